"""The recipe with prompts and answers in different processes: bitwise the run with the local engine."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from adapters.hf_convert.directory import HFDirectory
from tests.e2e.recipe import CYCLE, assert_equal_runs, finish, processes_of, read_lines, start

pytestmark = pytest.mark.slow
PD = ("--set", "engine=pd", "--set", "prefill=1", "--set", "decode=1", *CYCLE)


def samples(out: Path) -> list[dict[str, Any]]:
    """Every sample, without what the engines may differ in."""
    lines = [line for path in sorted((out / "rollouts").iterdir()) for line in read_lines(path)]
    return [{k: v for k, v in line.items() if k not in ("kv_bytes", "weight_version")} for line in lines]


def test_two_updates_and_a_resumed_third_are_those_of_the_local_engine(tmp_path: Path) -> None:
    """Checkpoints, metrics, samples and export; keys and values travelled for each sample; nothing is left running."""
    local, pd = tmp_path / "local", tmp_path / "pd"
    finish(start(local, "--updates", "3"), local)
    finish(start(pd, "--updates", "2", settings=PD), pd)
    finish(start(pd, "--updates", "3", "--resume", settings=PD), pd)
    assert_equal_runs(local, pd, update=3)
    assert samples(local) == samples(pd)
    lines = read_lines(pd / "metrics.jsonl")
    told = [{name for name in line if re.fullmatch("publish_.+_seconds", name)} for line in lines]
    assert told == 3 * [{f"publish_{phase}_seconds" for phase in ("write", "stage", "prepare", "drain", "commit")}]
    travelled = [line.get("kv_bytes", 0) for path in (pd / "rollouts").iterdir() for line in read_lines(path)]
    assert min(travelled) > 0
    exported = [HFDirectory(out / "hf") for out in (local, pd)]
    assert exported[0].tensors.keys() == exported[1].tensors.keys()
    assert all(exported[0].read(name).equal(exported[1].read(name)) for name in exported[0].tensors)
    deadline = time.monotonic() + 10
    while processes_of(pd) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(pd) == []
