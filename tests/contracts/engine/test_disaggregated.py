"""The prefill/decode engine: as the local engine to the last bit, on keys and values that really travel.

The contract's own tests run against it too (`engine` in conftest), most of them in `make test-all`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.contract import GenerationRequest, SamplingParams, Version, sample_requests
from adapters.vllm_engine.disaggregated import transports
from adapters.vllm_engine.disaggregated.router import Router
from adapters.vllm_engine.process import messages
from tests.tiny import OURO_CONFIG

from . import pd_cells
from .conftest import MODELS, drawn, make_requests, run, start_engine

BLOCK = 32
CELLS = [("prefill", "kill"), ("read", "kill"), ("commit, decode0", "exception"), ("settle, prefill0", "kill")]


@pytest.fixture(scope="module")
def stood(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pd_cells.Stand]:
    """One prefill and one decode worker, with faults to order."""
    folder = tmp_path_factory.mktemp("pd")
    models = {name: MODELS["ouro"](folder / name, seed=seed) for seed, name in enumerate("AB")}
    with pd_cells.stand("1P1D", models, folder) as running:
        yield running


@pytest.fixture
def local(stood: pd_cells.Stand) -> Any:
    return stood.local


def kv_bytes(num_tokens: int) -> int:
    """Keys and values of a prompt of the tiny Ouro: whole blocks, of every layer in every loop, in fp32."""
    c = OURO_CONFIG
    planes = c["num_hidden_layers"] * c["total_ut_steps"]
    blocks = math.ceil(num_tokens / BLOCK)
    return blocks * BLOCK * planes * 2 * c["num_key_value_heads"] * c["head_dim"] * 4


@pytest.mark.parametrize("execution", [None, "fixed:2", "early:0.5:1:4"])
def test_results_are_those_of_the_local_engine(stood: pd_cells.Stand, local: Any, execution: str | None) -> None:
    """Same seeds, tokens, log-probs and traces: difference 0.0. The bytes that travelled are the prompt's blocks."""
    requests = make_requests(f"equal-{execution}", execution=execution)
    ours, theirs = run(stood.engine, requests), run(local, requests)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert [r.logprobs for r in ours] == [r.logprobs for r in theirs], "expected a difference of exactly 0.0"
    assert [r.trace for r in ours] == [r.trace for r in theirs]
    if execution is None:  # later the prompts' full blocks are in the decode worker's cache
        assert [r.kv_bytes for r in ours] == [kv_bytes(len(r.prompt_token_ids)) for r in requests]
    assert {r.kv_bytes for r in theirs} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bf16(model: str, tmp_path: Path) -> None:
    """In bf16 too: a CPU computes a row alike in every batch, so that nothing but the hand-over could differ."""
    path = MODELS[model](tmp_path / "model", seed=0)
    found = {}
    for kind in ("local", "1P1D"):
        with start_engine(kind, path, tmp_path / kind, dtype="bfloat16") as engine:
            found[kind] = run(engine, make_requests("bf16"))
    ours, theirs = found["1P1D"], found["local"]
    off = [abs(a - b) for o, t in zip(ours, theirs, strict=True) for a, b in zip(o.logprobs, t.logprobs, strict=True)]
    print(f"{model} bf16: {len(off)} log-probs, largest difference {max(off):.1e}")
    assert all(result.kv_bytes > 0 for result in ours)
    assert drawn(ours) == drawn(theirs)


def test_one_prefill_serves_all_samples_of_a_prompt(stood: pd_cells.Stand, local: Any) -> None:
    """The prompt runs once; one sample reads all of it, the others only the last block, which is never shared."""
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = tuple((13 * i) % 250 + 2 for i in range(70))
    group = sample_requests(GenerationRequest(request_id="g", prompt_token_ids=prompt, sampling=sampling, seed=5), 6)
    prefill = stood.engine.workers[0].connection
    before = prefill.call(messages.GetCounters)["layer_tokens"]
    results = run(stood.engine, group)
    ran = prefill.call(messages.GetCounters)["layer_tokens"] - before
    assert ran == len(prompt) * OURO_CONFIG["num_hidden_layers"] * OURO_CONFIG["total_ut_steps"]
    assert sorted(r.kv_bytes for r in results) == [kv_bytes(1)] * 5 + [kv_bytes(70)]
    assert drawn(results) == drawn(run(local, group))
    assert stood.engine.workers[0].held_tokens == 0


def test_the_keys_and_values_are_those_of_the_prompt_that_was_handed_over(stood: pd_cells.Stand, local: Any) -> None:
    """With the keys and values of another prompt (its last token aside) a request continues that other prompt."""
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    prompts = {name: tuple((k * i) % 251 + 2 for i in range(69)) + (9,) for name, k in (("a", 7), ("b", 11))}
    a, b = (GenerationRequest(request_id=n, prompt_token_ids=p, sampling=sampling, seed=1) for n, p in prompts.items())
    prefill, decode = (worker.connection for worker in stood.engine.workers)
    prefill.call(messages.Prefill, requests=(b,))
    prefill.wait_for(lambda: prefill.events, "the handover")
    handover = prefill.events.popleft().handover
    decode.call(messages.Decode, requests=(a,), handovers=(handover,), readers=1)
    decode.wait_for(lambda: decode.results, "the result")
    (swapped,) = (decode.results.popleft(),)
    decode.events.clear()
    own, others = run(local, [a, b])
    assert own.token_ids != others.token_ids
    assert (swapped.token_ids, swapped.logprobs) == (others.token_ids, others.logprobs)


def test_a_prompt_of_another_version_is_refused_and_computed_again(
    stood: pd_cells.Stand, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every handover names the version that made it; the decode worker compares it with the one that it serves."""
    original, made = Router._prefilled, []

    def stale(self: Router, group: Any, event: messages.Prefilled) -> None:
        made.append(group.prefill_id)
        if len(made) == 1:
            old = msgspec.structs.replace(event.handover, version=Version(0, 7))
            event = msgspec.structs.replace(event, handover=old)
        original(self, group, event)

    monkeypatch.setattr(Router, "_prefilled", stale)
    requests = make_requests("stale", 1)
    assert drawn(run(stood.engine, requests)) == drawn(run(local, requests))
    assert len(made) == 2, "the prompt was not computed again"


def test_bad_requests_fail_alone_and_prompts_are_let_go(stood: pd_cells.Stand) -> None:
    """A request that only the decode worker can refuse does not keep the prompt that it shares with a good one."""
    good, bad = make_requests("shared", 1)[0], make_requests("refused", 1, execution="fixed:9")[0]
    results = {r.request_id: r for r in stood.engine.generate([bad, good])}
    assert results[bad.request_id].finish_reason == "error" and "fixed:9" in results[bad.request_id].error
    assert results[good.request_id].finish_reason == "length"
    assert [worker.held_tokens for worker in stood.engine.workers] == [0, 0]
    stood.engine.publish(Version(1, stood.engine.weight_version().update + 1), stood.weights["A"])  # drops all blocks


def test_health_names_every_worker_and_its_version(stood: pd_cells.Stand) -> None:
    """`health` says of each worker what it serves."""
    health = stood.engine.health()
    assert [worker.role for worker in health.workers] == ["prefill", "decode"]
    assert {worker.version for worker in health.workers} == {health.version} and health.reason is None
    assert [worker.pid for worker in health.workers] == stood.engine.pids


def test_transports_are_tried_and_never_leave_our_processes(caplog: pytest.LogCaptureFixture) -> None:
    """A list that does not work is named in a warning, and the next one is taken; this process's environment stays."""
    before = dict(os.environ)
    with caplog.at_level(logging.WARNING):
        assert transports.choose("no_such_transport") == transports.CANDIDATES["cpu"][0]
    assert "no_such_transport" in caplog.text
    assert dict(os.environ) == before


@pytest.mark.parametrize("cell", CELLS, ids=pd_cells.cell_id)
def test_a_lost_worker_is_an_error_or_is_replaced_by_another(stood: pd_cells.Stand, cell: tuple[str, str]) -> None:
    """See `pd_cells`; the matrix of all is `pd_matrix`."""
    print(pd_cells.check(stood, *cell))


def test_the_short_list_is_part_of_the_matrix() -> None:
    """A phase that is renamed is renamed here too."""
    assert set(CELLS) <= set(pd_cells.all_cells("1P1D")) and len(pd_cells.all_cells("1P1D")) >= 40


def test_closing_leaves_nothing(stood: pd_cells.Stand) -> None:
    """Last in this file: every process is gone, and every folder and bucket of theirs."""
    from .test_supervision import gone_within, owned_by

    before = set(owned_by(os.getpid()))
    directories = {Path(worker.connection._directory).name for worker in stood.engine.workers}
    assert directories <= before
    pids = stood.engine.pids
    stood.engine.close()
    assert all(gone_within(pid, 2) for pid in pids)
    assert not directories & set(owned_by(os.getpid()))
