"""The engines that must pass this suite. Each test file runs against every one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.contract import GenerationRequest, GenerationResult, SamplingParams, Version
from adapters.vllm_engine.local import LocalEngine
from adapters.vllm_engine.settings import EngineSettings
from tests.tiny import write_ouro

CONTEXT = 256
_updates = itertools.count(1)


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


@pytest.fixture(scope="session")
def other_ouro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return write_ouro(tmp_path_factory.mktemp("other_ouro"), seed=1)


@pytest.fixture(scope="session", params=["local"])
def engine(request: pytest.FixtureRequest, tiny_ouro: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine for the whole suite; a test leaves it serving the tiny model's weights (`restore`)."""
    with LocalEngine(settings_for(tiny_ouro, tmp_path_factory.mktemp("engine") / "engine.log")) as running:
        yield running


@pytest.fixture(scope="session")
def weights(tiny_ouro: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_ouro / "model.safetensors")


@pytest.fixture(scope="session")
def other_weights(other_ouro: Path) -> dict[str, torch.Tensor]:
    return load_file(other_ouro / "model.safetensors")


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


def drawn(results: Sequence[GenerationResult]) -> list[tuple[Any, ...]]:
    """What must repeat bitwise."""
    return [(r.token_ids, r.logprobs, r.trace) for r in results]
