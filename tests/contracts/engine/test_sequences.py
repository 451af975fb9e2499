"""A few random sequences of publish, generate, abort and kill; the module `sequences` runs as many as asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .sequences import run_sequences, stand


@pytest.mark.parametrize(
    "count", [4, pytest.param(int(os.environ.get("TETHER_SEQUENCES", "100")), marks=pytest.mark.slow)]
)
def test_every_response_is_that_of_the_version_it_names(tmp_path: Path, count: int) -> None:
    """Committed versions only, bitwise what an engine started on those weights gives. The same sequences each time."""
    with stand(tmp_path) as stood:
        run_sequences(stood, count=count, steps=8, first=count)
    print(dict(stood.counts))
    assert stood.counts["publications"] > count and stood.counts["responses, length"] > count
