"""A reward function that raises, hangs, dies or returns nonsense costs its own samples and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.reward_process import RewardProcesses

FAILING = "tests.unit.tether.bad_rewards:by_word"


def told(*responses: str) -> list[dict[str, object]]:
    return [{"where": f"sample-{i}", "prompt": "", "response": response, "response_token_ids": [1], "label": "yes",
             "metadata": None} for i, response in enumerate(responses)]  # fmt: skip


def test_a_failure_costs_its_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others get their rewards, in order, from processes that were started again; reasons are logged."""
    with RewardProcesses(FAILING, timeout_seconds=1.0, log_path=tmp_path / "reward.log") as judge:
        began = time.monotonic()
        got = judge(told("yes", "raise", "no", "hang", "yes", "die", "nan", "yes", "no"))
        assert time.monotonic() - began < 30
        assert got == [1.0, None, 0.0, None, 1.0, None, None, 1.0, 0.0]
        assert judge(told("yes", "no")) == [1.0, 0.0]
    for words in (
        "sample-1: the reward function raised KeyError",
        "sample-3: the reward function did not answer within",
        "sample-5: the process of the reward function died",
        "sample-6: the reward function returned nan",
    ):
        assert words in caplog.text
    assert "a reward function may print" in (tmp_path / "reward.log").read_text()


def test_a_function_that_always_fails_stops_the_run(tmp_path: Path) -> None:
    """An update without any reward is nobody's sample's fault."""
    with RewardProcesses("tests.unit.tether.bad_rewards:always", timeout_seconds=5, log_path=tmp_path / "log") as judge:
        with pytest.raises(RuntimeError, match="failed for all 2 samples: sample-0: the reward function raised"):
            judge(told("a", "b"))


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Also one whose function hangs, when the parent is killed without warning."""
    script = (
        "from tests.unit.tether.test_reward_process import *\n"
        f"judge = RewardProcesses(FAILING, timeout_seconds=60, log_path=Path({str(tmp_path / 'log')!r}))\n"
        "import threading; threading.Thread(target=lambda: judge(told('hang'))).start()\n"
        "process = judge._idle\n"
        "import time; time.sleep(3); print('up', flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    children = [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if (entry / "stat").exists() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(parent.pid)
    ]
    assert children, "the process of the reward function should run"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "a reward process outlived its parent"
        time.sleep(0.05)
