"""Decode steps as CUDA graphs: the eager engine's tokens and traces, in every policy, and the same again each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.contract import GenerationRequest, SamplingParams
from adapters.vllm_engine.client.local import LocalEngine
from tests.contracts.depth.harness import MIXED, POLICIES, first_turn
from tests.contracts.engine.conftest import MODELS, run, settings_for

pytestmark = pytest.mark.gpu
LAYERS, LOOPS = 3, 4


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(eager, with graphs), both in fp32, where rounding does not decide a token."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](folder / "model")
    with (
        LocalEngine(settings_for(model, folder / "eager", enforce_eager=True)) as eager,
        LocalEngine(settings_for(model, folder / "graphs")) as graphs,
    ):
        assert "Graph capturing finished" in Path(graphs.settings.log_path).read_text(errors="replace")
        assert "Graph capturing finished" not in Path(eager.settings.log_path).read_text(errors="replace")
        yield eager, graphs


def work(engine: LocalEngine, tag: str, count: int = 20) -> list[GenerationRequest]:
    policy = MIXED if engine.trace_kind == "loops" else "full"
    return [
        GenerationRequest(
            request_id=f"{tag}-{i}",
            prompt_token_ids=tuple(w["prompt"]),
            sampling=SamplingParams(max_tokens=w["tokens"], temperature=w["temperature"], ignore_eos=True),
            seed=w["seed"],
            execution=w["execution"],
        )
        for i, w in enumerate(first_turn(policy)[:count])
    ]


def test_graphs_change_no_token(engines: Any) -> None:
    """Batches shrink from 16 to 1 while they run, so that every captured size is replayed, most of them padded."""
    eager, graphs = (run(engine, work(engine, "all")) for engine in engines)
    for a, b in zip(eager, graphs, strict=True):
        assert (a.token_ids, a.trace) == (b.token_ids, b.trace)
    off = max(
        abs(x - y) for a, b in zip(eager, graphs, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )
    print(f"\n{engines[0].trace_kind}: log-probs differ by at most {off:.1e}")
    assert off <= 2e-6


def test_one_slot_repeats_bitwise(engines: Any) -> None:
    """The same request alone, twice: the same graph, the same bits.

    After a run that leaves its prompt in the prefix cache: a prompt of which less is computed is rounded otherwise.
    """
    _, graphs = engines
    for request in work(graphs, "alone", 7):
        _, first, second = (run(graphs, [request])[0] for _ in range(3))
        assert (first.token_ids, first.logprobs, first.trace) == (second.token_ids, second.logprobs, second.trace)


def test_deeper_loops_are_not_replayed(engines: Any) -> None:
    """fixed:2 replays half the loops of fixed:4 in each decode step: a graph fixes no depth."""
    _, graphs = engines
    if graphs.trace_kind != "loops":
        pytest.skip("this model has one depth")
    assert {r["execution"] for r in first_turn(MIXED)} == set(POLICIES)
    calls = {}
    for policy in ("fixed:4", "fixed:2"):
        before = graphs.counters()["layer_calls"]
        request = GenerationRequest(
            request_id=policy,
            prompt_token_ids=(5, 6, 7),
            sampling=SamplingParams(max_tokens=11, ignore_eos=True),
            seed=1,
            execution=policy,
        )
        run(graphs, [request])
        calls[policy] = graphs.counters()["layer_calls"] - before
    assert calls == {"fixed:4": LAYERS * LOOPS * 11, "fixed:2": LAYERS * (LOOPS + 2 * 10)}
