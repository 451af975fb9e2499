"""The generate hook: samples filled from an engine, one of our own seam's fakes for what is rare, and real vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tether.vime
from adapters.contract import (
    EngineDead,
    EngineError,
    GenerationRequest,
    GenerationResult,
    PublishReport,
    Trace,
    Version,
)
from tests.contracts.vime.framework import Sample, Status
from tests.ports import free_port
from tests.tiny import write_ouro
from tether.launch import end_with_parent
from tether.vime import publication, rollout, serve, versions, weights
from tether.vime.arguments import read_facts
from tether.vime.session import Session

PARAMS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False,
}  # fmt: skip


class Engine:
    """An engine that remembers what it was asked, and ends requests as it is told, by their number."""

    def __init__(self, ends: dict[int, str] | None = None) -> None:
        self.ends, self.asked, self.turns, self.published, self.lost = ends or {}, [], 0, [], 0

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        self.turns += 1
        if self.lost:
            self.lost -= 1
            raise EngineDead("killed")
        for request in reversed(requests):
            self.asked.append(request)
            end = self.ends.get(len(self.asked), "stop")
            count = {"stop": 4, "length": request.sampling.max_tokens, "abort": 2, "nothing": 0, "error": 0}[end]
            rows = len(request.prompt_token_ids) + count - 1
            yield GenerationResult(
                request_id=request.request_id,
                token_ids=tuple(range(20, 20 + count)),
                logprobs=(-0.5,) * count,
                seed=request.effective_seed,
                version=Version(3, 1 + len(self.published)),
                finish_reason="abort" if end == "nothing" else end,
                trace=Trace("loops", (rows,), bytes([4] * len(request.prompt_token_ids) + [2] * (count - 1)))
                if count
                else None,
                error="too long" if end == "error" else None,
            )

    def publish(self, version: Version, tensors: Any) -> PublishReport:
        self.published.append((version, dict(tensors)))
        return PublishReport(version=version, manifest_digest="", num_bytes=0, seconds={"write": 0.0})

    def weight_version(self) -> Version:
        return Version(6, 40)

    def restart(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def make_args(arguments: Callable[..., Any], tmp_path: Path) -> Callable[..., SimpleNamespace]:
    def make(**overrides: Any) -> SimpleNamespace:
        values = {"rollout_seed": 5, "debug_rollout_only": True, "save": str(tmp_path), "rollout_max_context_len": 40}
        values |= {"advantage_estimator": "grpo", "n_samples_per_prompt": 2, "reward_key": None}
        return arguments("ouro", **{**values, **overrides})

    return make


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Engine], Engine]]:
    """Lets the hook's session use an engine of ours."""

    def use_engine(engine: Engine) -> Engine:
        monkeypatch.setattr(rollout, "start_engine", lambda args: engine)
        return engine

    yield use_engine
    rollout.close_session()


def draw(args: Any, samples: Sequence[Sample], **params: Any) -> list[Sample]:
    async def all_of_them() -> list[Sample]:
        return await asyncio.gather(*(tether.vime.generate(args, s, {**PARAMS, **params}) for s in samples))

    return asyncio.run(all_of_them())


def test_a_sample_is_filled(make_args: Callable[..., Any], use: Callable[[Engine], Engine]) -> None:
    """Tokens, log-probs, version, seed and depths, in one turn of the engine for samples that are asked together."""
    engine = use(Engine({2: "length"}))
    args = make_args(tether_execution="early:0.9:2:4")
    samples = draw(args, [Sample(index=i, prompt="t5 t6 t7") for i in range(3)])
    assert engine.turns == 1 and len({r.effective_seed for r in engine.asked}) == 3
    assert [s.status for s in samples] == [Status.COMPLETED, Status.TRUNCATED, Status.COMPLETED]
    for sample, count in zip(samples, (4, 6, 4), strict=True):
        request = next(r for r in engine.asked if r.effective_seed == sample.metadata["tether"]["seed"])
        assert request.prompt_token_ids == (5, 6, 7) and request.execution == "early:0.9:2:4"
        assert 0 in request.sampling.stop_token_ids, "the model's own end token"
        assert sample.tokens == [5, 6, 7, *range(20, 20 + count)] and sample.response_length == count
        assert sample.rollout_log_probs == [-0.5] * count and sample.weight_versions == ["3.1"]
        depths = sample.multimodal_train_inputs["execution_depths"].tolist()
        assert depths == [4] * 3 + [2] * (count - 1) + [1]
        assert sample.response.split() == [f"t{i}" for i in range(20, 20 + count)]
        sample.reward = 1.0
    assert len(tether.vime.convert_samples(args, samples)["tokens"]) == 3


def test_aborted_samples_start_anew(make_args: Callable[..., Any], use: Callable[[Engine], Engine]) -> None:
    """What there is stays, with its status; the next attempt has the prompt alone and a seed of its own."""
    engine = use(Engine({1: "abort", 2: "nothing"}))
    args = make_args()
    (sample,) = draw(args, [Sample(index=7, tokens=[5, 6])])
    assert sample.status is Status.ABORTED and sample.tokens == [5, 6, 20, 21] and sample.response_length == 2
    (sample,) = draw(args, [sample])
    assert sample.status is Status.ABORTED and sample.tokens == [5, 6] and sample.multimodal_train_inputs is None
    (sample,) = draw(args, [sample])
    assert sample.status is Status.COMPLETED and len(sample.tokens) == 6 and sample.weight_versions == ["3.1"]
    assert len({request.effective_seed for request in engine.asked}) == 3
    (full,) = draw(args, [Sample(index=8, tokens=[5] * 40)])
    assert full.status is Status.TRUNCATED and len(engine.asked) == 3, "no room for a token: nothing is asked"
    with pytest.raises(EngineError, match="too long"):
        engine.ends[4] = "error"
        draw(args, [Sample(index=9, tokens=[5])])
    again = draw(args, [Sample(index=7, tokens=[5, 6])])[0].metadata["tether"]["seed"]
    assert again == engine.asked[0].effective_seed, "seeds depend on the run's seed, the sample and the attempt alone"


def test_a_lost_engine_is_started_again_once(make_args: Callable[..., Any], use: Callable[[Engine], Engine]) -> None:
    engine = use(Engine())
    engine.lost = 1
    assert draw(make_args(), [Sample(index=0, tokens=[5])])[0].status is Status.COMPLETED
    engine.lost = 2
    with pytest.raises(EngineDead):
        draw(make_args(), [Sample(index=1, tokens=[5])])


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"top_p": 0.9}, {"stop": ["x"]}, {"custom_params": {"a": 1}}], ids=str
)
def test_sampling_that_cannot_be_trained_on(
    make_args: Callable[..., Any], use: Callable[[Engine], Engine], params: dict[str, Any]
) -> None:
    use(Engine())
    with pytest.raises(ValueError, match="sampling"):
        draw(make_args(), [Sample(index=0, tokens=[5])], **params)


def test_weights_must_reach_the_engine(make_args: Callable[..., Any]) -> None:
    """The framework's other ways send weights to its own engines; all that is missing is told together."""
    with pytest.raises(ValueError) as caught:
        weights.where_weights_come(make_args(debug_rollout_only=False, update_weight_transport="nccl"))
    for flag in ("transport: got 'nccl', expected disk", "keep-files", "post-write-path"):
        assert flag in str(caught.value)


def test_only_committed_weights_are_published(tmp_path: Path, tiny_ouro: Path) -> None:
    """Each version once, in an incarnation of this run; an uncommitted directory does not exist; old ones go."""
    facts, engine = read_facts(tiny_ouro), Engine()
    source = weights.CommittedWeights(tmp_path, facts)
    for number in (1, 2, 3, 4):
        write_ouro(tmp_path / f"weight_v00000{number}", seed=number)
    source.bring(engine)
    assert not engine.published
    for number in (1, 2, 3):
        publication.commit(tmp_path / f"weight_v00000{number}", facts)
        source.bring(engine)
        source.bring(engine)
    assert [version for version, _ in engine.published] == [Version(7, number) for number in (1, 2, 3)]
    assert list(engine.published[0][1]) == list(facts.table)
    assert sorted(path.name for path in tmp_path.glob("weight_v*")) == [f"weight_v00000{n}" for n in (2, 3, 4)]


def start_server(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """What `python -m tether.vime.serve` runs."""
    words = [str(model), "--host", "127.0.0.1", "--port", str(port), "--context", "40", "--dtype", "float32"]
    command, environment = serve.command(serve.parse(words))
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "1+1", "http"])
def test_real_vllm(
    kind: str, make_args: Callable[..., Any], tmp_path: Path, tiny_ouro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's samples carry seed, version and depths; committed weights change them; a seed draws the same again."""
    monkeypatch.setattr(versions, "_last_rollout", -1)
    server = None
    if kind == "http":
        port = free_port()
        kind, server = f"http://127.0.0.1:{port}", start_server(tiny_ouro, port, tmp_path / "server.log")
    args = make_args(
        tether_engine=kind, tether_execution="early:0.55:1:4", debug_rollout_only=False, tether_deadline_seconds=120,
        update_weight_transport="disk", update_weight_disk_keep_files=True, update_weight_disk_dir=str(tmp_path / "w"),
        custom_update_weight_post_write_path="tether.vime.after_publication",
    )  # fmt: skip
    prompts = [[5, 6, 7], [9], [11, 12]]
    try:
        first = draw(args, [Sample(index=i, tokens=list(p)) for i, p in enumerate(prompts)])
        again = draw(args, [Sample(index=i, tokens=list(p)) for i, p in enumerate(prompts)])
        publication.commit(write_ouro(tmp_path / "w" / "weight_v000001", seed=1), read_facts(tiny_ouro))
        later = draw(args, [Sample(index=i, tokens=list(p)) for i, p in enumerate(prompts)])
    finally:
        rollout.close_session()
        if server is not None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)
    assert [s.tokens for s in again] == [s.tokens for s in first]
    assert [s.rollout_log_probs for s in again] == [s.rollout_log_probs for s in first]
    assert len({s.weight_versions[0] for s in first}) == 1 and first[0].weight_versions != later[0].weight_versions
    assert later[0].weight_versions[0].endswith(".1")
    assert [s.rollout_log_probs for s in later] != [s.rollout_log_probs for s in first]
    depths = torch.cat([s.multimodal_train_inputs["execution_depths"] for s in first])
    assert {1, 4} <= set(depths.tolist())
    for sample in first:
        sample.reward = 0.0
    data = tether.vime.convert_samples(args, first)
    assert [len(side["execution_depths"]) for side in data["multimodal_train_inputs"]] == [
        len(t) for t in data["tokens"]
    ]


def test_a_closed_session_says_so() -> None:
    session = Session(Engine, lambda engine: None)
    session.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(session.generate(GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=None)))  # type: ignore[arg-type]
