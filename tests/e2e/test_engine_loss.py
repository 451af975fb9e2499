"""A run whose engine is killed goes on as if nothing had happened; if none can live, it stops with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.recipe import assert_equal_runs, finish, processes_of, read_lines, start, wait_until
from tether.stored import find_checkpoint

pytestmark = pytest.mark.slow


def engine_of(out: Path) -> int | None:
    """The engine process of a run: it writes the engine's log, and so does its parent, the fork server."""
    writers = {}
    for pid in processes_of(out):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/fd/1").readlink().name == "engine.log":
                writers[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return next((pid for pid, parent in writers.items() if parent in writers), None)


def kill_engine(out: Path) -> None:
    if (pid := engine_of(out)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_run_survives_one_loss_and_stops_whole_at_many(tmp_path: Path) -> None:
    """Engine killed once after update 1: the run goes on. Killed again and again after update 3: it stops with a
    checkpoint of update 3. Resumed, it ends bitwise where an undisturbed run ends."""
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "lossy"
    finish(start(undisturbed), undisturbed)

    process = start(out, "--updates", "40")
    try:
        for lines in (1, 3):
            wait_until(lambda n=lines: len(read_lines(out / "metrics.jsonl")) >= n, seconds=300, what=f"update {lines}")
            assert process.poll() is None, out.with_suffix(".log").read_text()
            kill_engine(out)
        stop = threading.Event()
        killer = threading.Thread(target=keep_killing, args=(out, stop))
        killer.start()
        try:
            assert process.wait(timeout=240) == 1
        finally:
            stop.set()
            killer.join()
    finally:
        process.kill()
    done = len(read_lines(out / "metrics.jsonl"))
    assert "Engine" in out.with_suffix(".log").read_text()
    assert find_checkpoint(out).name == f"iter_{done:07d}", "what was trained since the last checkpoint must be saved"
    wait_until(lambda: not processes_of(out), seconds=30, what="the end of the last process")

    finish(start(out, "--updates", str(max(done + 1, 4)), "--resume"), out)
    assert done == 3, "the engine was killed too late to compare with four undisturbed updates"
    assert_equal_runs(undisturbed, out, update=4)


def keep_killing(out: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        kill_engine(out)
        time.sleep(0.2)
