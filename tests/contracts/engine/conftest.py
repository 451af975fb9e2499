"""The engines and models that must pass this suite. Each test file runs against every one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.contract import GenerationRequest, GenerationResult, SamplingParams, Version
from adapters.vllm_engine.client.launch import PROCESS
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.disaggregated.engine import DisaggregatedEngine
from adapters.vllm_engine.settings import EngineSettings
from tests.tiny import write_olmoe, write_ouro

from .http_server import ServedEngine

CONTEXT = 256
MODELS = {"ouro": write_ouro, "olmoe": write_olmoe}
ROUNDING = {"loops": 2e-6 if torch.cuda.is_available() else 0.0, "experts": 2e-6}
"""By trace kind: how far log-probs may change with the batch (fp32). On CPU dense layers compute a row alike in every
batch; the fused experts' sums depend on how many rows an expert gets, and CUDA's kernels are chosen by the number of
rows, which shows in the last bits."""
PD_ENGINES = ("1P1D", "1P2D")
"""Prefill and decode workers of the disaggregated engines that must pass the whole suite."""


def settings_for(model: Path, log: Path, **overrides: Any) -> EngineSettings:
    """A small fp32 engine for the tiny model."""
    values: dict[str, Any] = {
        "model": model,
        "log_path": log,
        "max_model_len": CONTEXT,
        "dtype": "float32",
        "kv_cache_bytes": 64 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "start_seconds": 180,
        "deadline_seconds": 60,
    }
    return EngineSettings(**{**values, **overrides})


@pytest.fixture(scope="session", params=MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model, "A", and the same with other weights, "B"."""
    folder = tmp_path_factory.mktemp(request.param)
    return {name: MODELS[request.param](folder / name, seed=seed) for seed, name in enumerate("AB")}


def start_engine(kind: str, model: Path, folder: Path, *, module: str = PROCESS, **overrides: Any) -> Any:
    """ "local", "http" for a server of its own, or "1P2D" for one prefill and two decode workers."""
    if kind == "local":
        return LocalEngine(settings_for(model, folder / "engine.log", **overrides), module=module)
    if kind == "http":
        return ServedEngine(settings_for(model, folder / "server.log", **overrides))
    counts = {"prefill": int(kind[0]), "decode": int(kind[2])}
    workers = {
        role: [settings_for(model, folder / f"{role}{i}.log", **overrides) for i in range(count)]
        for role, count in counts.items()
    }
    return DisaggregatedEngine(**workers, module=module)


@pytest.fixture(
    scope="session",
    params=["local", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*PD_ENGINES, "http"))],
)
def engine(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One engine for the whole suite; a test leaves it serving the tiny model's weights (`restore`)."""
    with start_engine(request.param, models["A"], tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(scope="session")
def weights(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    return load_file(models["A"] / "model.safetensors")


@pytest.fixture(scope="session")
def other_weights(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    return load_file(models["B"] / "model.safetensors")


@pytest.fixture
def loops_only(engine: Any) -> None:
    """Skips a test about depth for a model that has none to choose."""
    if engine.trace_kind != "loops":
        pytest.skip(f"a trace of {engine.trace_kind} has no depth")


@pytest.fixture
def restore(engine: Any, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Publishes the tiny model's own weights when a test that published others is done."""
    yield
    engine.publish(next_version(engine), weights)


def next_version(engine: Any) -> Version:
    served = engine.weight_version()
    return Version(served.incarnation, served.update + 1)


def make_requests(tag: str, count: int = 8, **overrides: Any) -> list[GenerationRequest]:
    """Requests of odd prompt lengths (one token, block size less and more one), seeds 1000, 1001, ..."""
    lengths = [1, 2, 5, 31, 32, 33, 40, 64]
    sampling = overrides.pop("sampling", SamplingParams(max_tokens=12, ignore_eos=True))
    return [
        GenerationRequest(
            request_id=f"{tag}-{i}",
            prompt_token_ids=tuple((37 * i + 11 * j) % 254 + 2 for j in range(lengths[i % len(lengths)])),
            sampling=sampling,
            seed=1000 + i,
            **overrides,
        )
        for i in range(count)
    ]


def run(engine: Any, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Results in the order of the requests, none of them failed."""
    results = {result.request_id: result for result in engine.generate(requests)}
    assert len(results) == len(requests)
    failed = [r for r in results.values() if r.error]
    assert not failed, failed[:3]
    return [results[r.request_id] for r in requests]


class Drawn:
    """What must repeat: tokens and trace exactly, log-probs within the rounding of another batch."""

    def __init__(self, result: GenerationResult) -> None:
        self.tokens, self.logprobs, self.trace = result.token_ids, result.logprobs, result.trace

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Drawn) or (self.tokens, self.trace) != (other.tokens, other.trace):
            return False
        return near(self.logprobs, other.logprobs, self.trace.kind if self.trace else "loops")

    def __repr__(self) -> str:
        return f"Drawn({self.tokens}, {self.logprobs}, {self.trace})"

    __hash__ = None  # type: ignore[assignment]


def near(one: Sequence[float], other: Sequence[float], kind: str) -> bool:
    """Equal log-probs of a model with this kind of trace."""
    return len(one) == len(other) and all(abs(a - b) <= ROUNDING[kind] for a, b in zip(one, other, strict=True))


def drawn(results: Sequence[GenerationResult]) -> list[Drawn]:
    """What must repeat."""
    return [Drawn(r) for r in results]
