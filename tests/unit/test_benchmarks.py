"""Benchmarks that a run on a device pays for run to their end at tiny size before they are sent there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["train_replay", "logprob", "olmoe_train"])
def test_runs_at_tiny_size(module: str) -> None:
    """Exit status 0, a line of JSON, and no record among the results."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--tiny", "--repeats", "1", "--profile"]
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads("{" + done.stdout.strip().splitlines()[-1].partition("{")[2])
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before
