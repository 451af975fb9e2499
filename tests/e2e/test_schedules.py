"""The recipe at each kind of depth: two updates in one go equal one and a resumed one, bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.recipe import assert_equal_runs, finish, read_lines, start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("depth", ["cycle:3,4,2", "early:0.6:2:4", "delayed:0.6:1:4"])
def test_two_updates_equal_one_and_a_resumed_one(tmp_path: Path, depth: str) -> None:
    """Parameters, moments and metrics; the early exits really mix depths."""
    settings = ("--set", f"depth={depth}", "--set", "save_every=1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(start(whole, "--updates", "2", settings=settings), whole)
    finish(start(parts, "--updates", "1", settings=settings), parts)
    finish(start(parts, "--updates", "2", "--resume", settings=settings), parts)
    assert_equal_runs(whole, parts, update=2)
    histogram = [
        sum(column) for column in zip(*(m["depth_histogram"] for m in read_lines(whole / "metrics.jsonl")), strict=True)
    ]
    print(f"{depth}: loops {histogram}")
    assert sum(count > 0 for count in histogram) >= 2
