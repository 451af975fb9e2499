"""The supervisor: what it starts, when it starts it again, and when it gives up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.launch import Nodes, Supervisor, command
from tether.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[3]
ATTEMPT = """
import json, os, pathlib, sys
out, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
calls = out / "calls"
number = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    print(json.dumps(sys.argv[3:]), file=file)
update, code = plan[number]
if update is not None:
    folder = out / "checkpoints" / f"iter_{update:07d}"
    folder.mkdir(parents=True)
    (folder / "tether.json").write_text('{"files": {}}')
os._exit(code)
"""
"""Stands for a run: saves a checkpoint or none, and ends with a code, both by a plan."""


def supervise(out: Path, plan: list[tuple[int | None, int]], *arguments: str, max_restarts: int = 5) -> int:
    launcher = [sys.executable, "-c", ATTEMPT, str(out), json.dumps(plan)]
    return Supervisor(launcher, arguments, directory=RunDirectory(out), max_restarts=max_restarts).run()


def calls(out: Path) -> list[list[str]]:
    return [json.loads(line) for line in (out / "calls").read_text().splitlines()]


def test_a_run_that_gets_further_is_restarted(tmp_path: Path) -> None:
    """From its newest checkpoint, without the options that were for the first start only."""
    plan = [(0, 1), (3, -9), (4, 0)]
    first = ("--out", "O", "--resume-from", "7", "--allow-change=lr", "--set", "a=b")
    assert supervise(tmp_path, plan, *first) == 0
    again = ["--out", "O", "--set", "a=b", "--resume"]
    assert calls(tmp_path) == [list(first), again, again]


@pytest.mark.parametrize(
    ("plan", "max_restarts", "attempts", "why"),
    [
        ([(None, 1)], 5, 1, "it had got no further since it was started"),
        ([(0, 1), (None, 1)], 5, 2, "it had got no further since it was started"),
        ([(0, 1), (1, 1), (2, 1)], 2, 3, "it was restarted 2 time(s), as often as --max-restarts allows"),
        ([(0, 1)], 0, 1, "not restarted"),
    ],
)
def test_it_gives_up(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plan: list[tuple[int | None, int]],
    max_restarts: int,
    attempts: int,
    why: str,
) -> None:
    """Without progress at once, otherwise after as many restarts as allowed."""
    assert supervise(tmp_path, plan, max_restarts=max_restarts) == 1
    assert len(calls(tmp_path)) == attempts and why in capsys.readouterr().err


def test_input_that_cannot_be_used_is_not_tried_again(tmp_path: Path) -> None:
    """Exit code 2 is an answer."""
    assert supervise(tmp_path, [(0, 2)]) == 2
    assert len(calls(tmp_path)) == 1


def test_a_signal_is_passed_on_once_and_ends_it(tmp_path: Path) -> None:
    """The run is told, not the supervisor's group; what it ends with is the answer, and nothing is restarted."""
    child = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(5)); print(1, flush=True); "
    code = (
        "import sys; from pathlib import Path; from tether.launch import Supervisor; "
        "from tether.run_directory import RunDirectory; "
        f"run = Supervisor([sys.executable, '-c', {child + 'time.sleep(60)'!r}], [], "
        f"directory=RunDirectory(Path({str(tmp_path)!r})), max_restarts=9); sys.exit(run.run())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 5
    finally:
        process.kill()


def test_the_run_ends_with_its_supervisor(tmp_path: Path) -> None:
    """Even if that is killed: the kernel tells the run."""
    code = (
        "import sys; from pathlib import Path; from tether.launch import Supervisor; "
        "from tether.run_directory import RunDirectory; "
        "Supervisor([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'], [], "
        f"directory=RunDirectory(Path({str(tmp_path)!r})), max_restarts=0).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=20)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and is_running(pid):
        assert time.monotonic() < deadline, "the run outlived its supervisor"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_commands() -> None:
    """One process needs no torchrun; several machines meet at the first one's port."""
    assert command(1, Nodes())[1:] == ["-m", "tether.train"]
    assert command(4, Nodes())[1:] == [
        "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", "-m", "tether.train"
    ]  # fmt: skip
    assert command(4, Nodes(count=2, rank=1, rendezvous="head:2950"))[3:] == [
        "--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "head", "--master-port", "2950",
        "-m", "tether.train",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="--nodes 2: expected a divisor of train_devices = 3"):
        command(3, Nodes(count=2, rendezvous="head:1"))
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        Nodes(count=2)
    with pytest.raises(ValueError, match="0 <= node-rank < nodes"):
        Nodes(count=2, rank=2, rendezvous="head:1")
