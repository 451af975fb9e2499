"""Runs examples/ouro/run.sh as a user would, and compares what runs leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tether.stored import open_weights

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "ouro" / "run.sh"
FEW_PROMPTS = ("--set", "prompts_per_update=8")
CYCLE = ("--set", "depth=cycle:3,4,2")
"""A schedule that a resume has to enter in the middle."""


def start(out: Path, *arguments: str, settings: tuple[str, ...] = CYCLE) -> subprocess.Popen[str]:
    """The recipe with few prompts, its output going to OUT.log."""
    command = [str(RECIPE), "--out", str(out), *arguments, *FEW_PROMPTS, *settings]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=out.parent)


def finish(process: subprocess.Popen[str], out: Path) -> str:
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
    text = out.with_suffix(".log").read_text()
    assert code == 0, text
    return text


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def processes_of(out: Path) -> list[int]:
    """Pids of the processes whose command line names a run directory, or that write a file in it (forked engines)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(out) in (entry / "cmdline").read_bytes() or (entry / "fd/1").readlink().is_relative_to(out):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def assert_equal_runs(one: Path, other: Path, *, update: int) -> None:
    """Newest checkpoints and metrics of two runs are bitwise the same, times aside."""
    stored = open_weights(one), open_weights(other)
    assert {weights.path.name for weights in stored} == {f"iter_{update:07d}"}
    names = sorted(stored[0].reader.shapes)
    assert names == sorted(stored[1].reader.shapes)
    pairs = zip(*(weights.reader.read(names) for weights in stored), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []
    assert sum(name.startswith("optimizer.") for name in names) == 3 * 36, "moments and masters of 36 trained tensors"
    assert without_times(one) == without_times(other)


def without_times(out: Path) -> list[dict[str, Any]]:
    lines = read_lines(out / "metrics.jsonl")
    timed = ("_seconds", "_per_second", "_mfu", "_bytes")
    return [{key: value for key, value in line.items() if not key.endswith(timed)} for line in lines]
