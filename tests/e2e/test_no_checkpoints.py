"""A run that writes no checkpoints: what it exports, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.recipe import finish, start, without_times
from tether.stored import open_weights

pytestmark = pytest.mark.slow


def test_export_from_memory_equals_that_of_a_checkpoint(tmp_path: Path) -> None:
    """The same update with and without checkpoints leaves the same metrics and bitwise the same export."""
    runs = {every: tmp_path / f"every{every}" for every in (0, 1)}
    for every, out in runs.items():
        settings = ("--set", "depth=fixed:2", "--set", f"save_every={every}", "--set", "save_start=false")
        finish(start(out, "--updates", "1", settings=settings), out)
    assert not list((runs[0] / "checkpoints").iterdir())
    assert [path.name for path in (runs[1] / "checkpoints").glob("iter_*")] == ["iter_0000001"]
    assert without_times(runs[0]) == without_times(runs[1])
    without, saved = (open_weights(out / "hf") for out in runs.values())
    assert without.source.config == saved.source.config
    names = list(saved.shapes)
    apart = [
        name for (name, a), (_, b) in zip(without.read(names), saved.read(names), strict=True) if not torch.equal(a, b)
    ]
    assert apart == [] and list(without.shapes) == names
    trained = open_weights(runs[1])
    assert any(not torch.equal(a, b) for (_, a), (_, b) in zip(
        saved.read(names), open_weights(trained.source.path).read(names), strict=True
    ))  # fmt: skip

    again = start(runs[0], "--updates", "2", "--resume", settings=("--set", "depth=fixed:2", "--set", "save_every=0"))
    again.wait(timeout=120)
    assert "save_every=0" in runs[0].with_suffix(".log").read_text()
