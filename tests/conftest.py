"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch and vLLM are imported: results repeat, nothing compiles, nothing asks a hub.
for name, value in {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def tiny_ouro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp32 Ouro checkpoint at std 0.02, the one for exactness tests. Read only: other tests share it."""
    from tests.tiny import write_ouro

    return write_ouro(tmp_path_factory.mktemp("tiny_ouro"))


@pytest.fixture(scope="session")
def tiny_olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp32 OLMoE checkpoint at std 0.02, the one for exactness tests. Read only: other tests share it."""
    from tests.tiny import write_olmoe

    return write_olmoe(tmp_path_factory.mktemp("tiny_olmoe"))


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-Core on this process alone, taken back afterwards."""
    from adapters.megatron import cpu_runtime
    from adapters.megatron.runtime import RuntimeSettings, initialize, shutdown

    initialize(RuntimeSettings(seed=7))
    yield
    shutdown()
    cpu_runtime.uninstall()
