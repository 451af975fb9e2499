"""Runs that are asked to stop, that fail and are restarted, and that are spread over processes and machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT, assert_equal_runs, finish, processes_of, read_lines, start, wait_until, without_times
from tests.ports import free_port
from tests.tiny import write_ouro
from tether.stored import find_checkpoint

pytestmark = pytest.mark.slow
RARELY = ("--set", "depth=cycle:3,4,2", "--set", "save_every=50")
TWO = ("--set", "train_devices=2", "--set", "deadline_seconds=120", "--set", "save_every=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(out, settings=RARELY), out)
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_run_whole(undisturbed: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The update is finished and saved, the exit code is 0, and the printed command goes on to the same end."""
    out = tmp_path / "run"
    process = start(out, "--updates", "4", settings=RARELY)
    wait_until(lambda: bool(read_lines(out / "metrics.jsonl")), seconds=300, what="an update")
    process.send_signal(number)
    text = finish(process, out)
    done = len(read_lines(out / "metrics.jsonl"))
    assert 1 <= done < 4, "stopped too late for this test"
    assert f"{number.name}: stopping after this update" in text
    assert f"stopped after update {done} of 4 ({number.name}); its checkpoint is complete" in text
    assert find_checkpoint(out).name == f"iter_{done:07d}" and not (out / "hf").exists()
    assert not list((out / "rollouts").glob("*.staging"))
    command = next(line for line in text.splitlines() if line.startswith("resume: ")).removeprefix("resume: ")
    again = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert_equal_runs(undisturbed, out, update=4)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Nothing is waited for; what is on disk is whole, and the engine goes too."""
    out = tmp_path / "run"
    process = start(out, "--updates", "40", settings=RARELY)
    try:
        wait_until(lambda: bool(read_lines(out / "metrics.jsonl")), seconds=300, what="an update")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGSTOP)  # the update cannot end before the second one
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) in (0, 128 + signal.SIGTERM)
    finally:
        process.kill()
    assert find_checkpoint(out).name.startswith("iter_")
    wait_until(lambda: not processes_of(out), seconds=30, what="the engine of the stopped run")


def test_a_time_limit_ends_a_run_whole(tmp_path: Path) -> None:
    """A limit that has passed before the first update still saves; the next start goes on."""
    out = tmp_path / "run"
    limit = ("--set", "stop_after_seconds=1")
    text = finish(start(out, "--updates", "4", settings=(*RARELY, *limit)), out)
    assert "stopped after update 0 of 4 (time limit of 1 s)" in text and find_checkpoint(out).name == "iter_0000000"
    finish(start(out, "--updates", "1", "--resume", settings=RARELY), out)
    assert [line["event"] for line in read_lines(out / "events.jsonl") if line["event"] != "saved"] == [
        "start", "stopped", "resume", "finished"
    ]  # fmt: skip


def launch(
    model: Path, data: Path, out: Path, *arguments: str, own: tuple[str, ...] = (), name: str = ""
) -> subprocess.Popen[bytes]:
    """`python -m tether.launch` on a tiny model, its output going to OUTNAME.log."""
    command = [sys.executable, "-m", "tether.launch", *own, "--model", str(model), "--data", str(data)]
    command += ["--out", str(out), *arguments, *TWO]
    for setting in ("prompts_per_update=2", "max_new_tokens=8", "lr=1e-3", "group_size=4"):
        command += ["--set", setting]
    with out.with_name(f"{out.name}{name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def ended(process: subprocess.Popen[bytes], out: Path, name: str = "") -> str:
    try:
        code = process.wait(timeout=400)
    finally:
        process.terminate()
    text = out.with_name(f"{out.name}{name}.log").read_text()
    assert code == 0, text
    return text


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Model, data, and OUT of a run of three updates on two processes."""
    folder = tmp_path_factory.mktemp("two")
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"prompt_token_ids": [{i}, 7, {i + 3}], "label": "t5"}}\n' for i in range(3, 9)))
    model = write_ouro(folder / "model")
    ended(launch(model, data, folder / "run", "--updates", "3"), folder / "run")
    return model, data, folder / "run"


def test_a_failed_run_is_restarted(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """One of two trainers is killed in each of two attempts; the third attempt ends where nothing was killed."""
    model, data, want = two
    out = tmp_path / "run"
    process = launch(model, data, out, "--updates", "3", own=("--max-restarts", "2"))
    for lines in (1, 2):
        wait_until(lambda n=lines: len(read_lines(out / "metrics.jsonl")) >= n, seconds=300, what=f"update {lines}")
        os.kill(trainer(out, rank=1), signal.SIGKILL)
        wait_until(lambda n=lines: count(out, "resume") >= n, seconds=300, what=f"restart {lines}")
    text = ended(process, out)
    assert "restart 1 of at most 2" in text and "restart 2 of at most 2" in text
    assert without_times(out) == without_times(want)


def test_a_signal_reaches_every_process(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The launcher gets it, both trainers stop after the same update, and all end with 0."""
    model, data, _ = two
    out = tmp_path / "run"
    process = launch(model, data, out, "--updates", "90")
    wait_until(lambda: bool(read_lines(out / "metrics.jsonl")), seconds=300, what="an update")
    process.send_signal(signal.SIGINT)
    text = ended(process, out)
    done = len(read_lines(out / "metrics.jsonl"))
    assert f"stopped after update {done} of 90" in text and find_checkpoint(out).name == f"iter_{done:07d}"
    wait_until(lambda: not processes_of(out), seconds=30, what="the last process of a stopped run")


def test_two_machines(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Two launchers, each with one process, meet at a port and do what one launcher with two processes does."""
    model, data, want = two
    out = tmp_path / "run"
    rendezvous = f"127.0.0.1:{free_port()}"
    nodes = [("--nodes", "2", "--node-rank", str(i), "--rendezvous", rendezvous) for i in range(2)]
    processes = [launch(model, data, out, "--updates", "3", own=own, name=str(i)) for i, own in enumerate(nodes)]
    for i, process in enumerate(processes):
        ended(process, out, str(i))
        log = (out / "logs" / f"trainer_rank{i}.log").read_text()
        assert log.count("garbage collection leaves out") == 1, "every rank freezes its objects of the start"
    assert without_times(out) == without_times(want)


def trainer(out: Path, *, rank: int) -> int:
    for pid in processes_of(out):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment and b"tether.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no trainer of rank {rank}")


def count(out: Path, event: str) -> int:
    return sum(line["event"] == event for line in read_lines(out / "events.jsonl"))
