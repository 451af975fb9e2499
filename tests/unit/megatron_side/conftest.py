"""A single-process Megatron runtime for the tests of this folder, taken back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-Core on this process alone."""
    from adapters.megatron import cpu_runtime
    from adapters.megatron.runtime import RuntimeSettings, initialize, shutdown

    initialize(RuntimeSettings(seed=7))
    yield
    shutdown()
    cpu_runtime.uninstall()
