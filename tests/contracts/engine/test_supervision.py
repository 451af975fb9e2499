"""An engine never outlives its owner, and its death or silence is an error in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adapters.contract import EngineDead, EngineTimeout, SamplingParams
from adapters.vllm_engine.local import LocalEngine

from .conftest import make_requests, run, settings_for

OWNER = """
import sys, time
from pathlib import Path
from adapters.vllm_engine.local import LocalEngine
from tests.contracts.engine.conftest import settings_for
engine = LocalEngine(settings_for(Path(sys.argv[1]), Path(sys.argv[2])))
print(engine.pid, flush=True)
time.sleep(600)
"""


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_an_engine_ends_when_its_owner_is_killed(tiny_ouro: Path, tmp_path: Path) -> None:
    """kill -9 of the owner: the engine notices its closed pipe and ends by itself."""
    command = [sys.executable, "-c", OWNER, str(tiny_ouro), str(tmp_path / "log")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    owner.kill()
    owner.wait()
    assert gone_within(pid, 10)


def test_death_and_silence_are_errors_in_bounded_time(tiny_ouro: Path, tmp_path: Path) -> None:
    """A stopped process times out and recovers when continued; a killed one is EngineDead, with its log's end."""
    engine = LocalEngine(settings_for(tiny_ouro, tmp_path / "log", deadline_seconds=2))
    try:
        expected = run(engine, make_requests("x", 2))
        os.kill(engine.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(EngineTimeout, match="waited 2 s"):
            engine.health()
        assert time.monotonic() - started < 5
        os.kill(engine.pid, signal.SIGCONT)
        assert engine.health().state == "serving"
        assert [r.token_ids for r in run(engine, make_requests("y", 2))] == [r.token_ids for r in expected]
        stream = engine.generate(make_requests("z", 4, sampling=SamplingParams(max_tokens=150, ignore_eos=True)))
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="status -9"):
            list(stream)
    finally:
        engine.close()
        engine.close()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A wrong directory: EngineDead with the end of the log, and nothing is left running."""
    with pytest.raises(EngineDead, match="no-such-model"):
        LocalEngine(settings_for(tmp_path / "no-such-model", tmp_path / "log"))


def test_close_ends_the_process(tiny_ouro: Path, tmp_path: Path) -> None:
    """Cooperative shutdown: process gone, socket directory gone, closing twice is fine."""
    engine = LocalEngine(settings_for(tiny_ouro, tmp_path / "log"))
    pid, directory = engine.pid, engine._directory
    engine.close()
    assert gone_within(pid, 1) and not directory.exists()
    with pytest.raises(EngineDead):
        engine.health()
