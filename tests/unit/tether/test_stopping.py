"""Requests to stop: the first is kept, a second ends the process at once, wherever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.stopping import REPEAT_SECONDS, SIGNALS, StopRequests

ROOT = Path(__file__).resolve().parents[3]
BUSY = """
import sys, time
from tether.stopping import StopRequests
with StopRequests() as stop:
    print("ready", flush=True)
    if sys.argv[1] == "blocked":  # in C, where no handler of Python runs: as inside of a collective
        import ctypes
        for _ in range(3):  # a signal ends one of them early
            ctypes.CDLL(None).sleep(60)
    while stop.reason() is None:
        time.sleep(0.01)
    print("finished after", stop.reason(), flush=True)
"""


def test_a_signal_is_a_request_while_watched(capsys: pytest.CaptureFixture[str]) -> None:
    """It changes nothing but the reason; a repetition within a second is the same request. Handlers come back."""
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequests() as stop:
        assert stop.reason() is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while stop.reason() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert stop.reason() == "SIGINT"
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert capsys.readouterr().err.count("stopping after this update") == 1


def test_a_time_limit_is_a_request() -> None:
    """Reached or not; 0 is none."""
    with StopRequests(limit_seconds=0.05) as stop:
        assert stop.reason() is None
        time.sleep(0.06)
        assert stop.reason() == "time limit of 0.05 s"
    with StopRequests() as stop:
        assert stop.reason() is None


@pytest.mark.parametrize("how", ["python", "blocked"])
def test_one_signal_is_waited_for_and_a_second_is_not(how: str) -> None:
    """The second one counts also where the main thread waits in C and never sees the first one."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        if how == "python":
            assert process.wait(timeout=20) == 0 and process.stdout.read() == "finished after SIGTERM\n"
            return
        time.sleep(REPEAT_SECONDS + 0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 128 + signal.SIGINT
    finally:
        process.kill()
