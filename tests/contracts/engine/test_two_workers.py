"""An engine of two tensor-parallel workers ends whole: no process, no shared memory of Tether's or of vLLM's."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from adapters.contract import EngineDead, EngineTimeout
from adapters.vllm_engine.client import forkserver
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.process.main import environment

from . import faults
from .conftest import drawn, make_requests, next_version, run, settings_for

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fault_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "fault"))


def members(group: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group_id = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group_id) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def segments(pids: list[int]) -> set[Path]:
    """Shared memory that processes have mapped and that has a name."""
    names: set[str] = set()
    for pid in pids:
        names |= set(re.findall(r"(/dev/shm/\S+)\n", Path(f"/proc/{pid}/maps").read_text()))
    return {Path(name) for name in names}


def all_gone(group: int, mapped: set[Path], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (members(group) or any(path.exists() for path in mapped)):
        time.sleep(0.1)
    assert members(group) == [] and [path for path in mapped if path.exists()] == []


def start(model: Path, tmp_path: Path, **overrides: Any) -> LocalEngine:
    return LocalEngine(settings_for(model, tmp_path / "log", tensor_parallel=2, **overrides), module=faults.MODULE)


def test_closing_leaves_nothing(tiny_ouro: Path, tmp_path: Path) -> None:
    """After publication and generation, `close` ends all processes of the engine and removes all their segments."""
    engine = start(tiny_ouro, tmp_path)
    engine.publish(next_version(engine), load_file(tiny_ouro / "model.safetensors"))
    run(engine, make_requests("a", 2))
    pids = members(engine.pid)
    mapped = segments(pids)
    assert len(pids) >= 3 and len(mapped) >= 2, (pids, mapped)
    engine.close()
    all_gone(engine.pid, mapped, seconds=1)


def test_a_lost_or_stopped_worker_is_an_error_and_restart_ends_it(tiny_ouro: Path, tmp_path: Path) -> None:
    """Worker 2 of 2 killed, then stopped, while generating: a typed error; `restart` leaves neither of them behind."""
    engine = start(tiny_ouro, tmp_path, deadline_seconds=5, heartbeat_seconds=5)
    expected = drawn(run(engine, make_requests("a", 2)))
    for fault in ("kill", "stop"):
        group, mapped = engine.pid, segments(members(engine.pid))
        faults.order(("prepare", fault))
        with pytest.raises((EngineDead, EngineTimeout)):
            engine.publish(next_version(engine), load_file(tiny_ouro / "model.safetensors"))
        engine.restart()
        all_gone(group, {path for path in mapped if "tether" not in path.name})
        assert drawn(run(engine, make_requests(fault, 2))) == expected
    engine.close()


def test_kill_9_of_the_owner(tiny_ouro: Path, tmp_path: Path) -> None:
    """All processes end by themselves, vLLM's segments go with them, and the next start removes the weights."""
    report = tmp_path / "report"
    with open(tmp_path / "owner.log", "ab") as log:
        owner = forkserver.fork(
            "tests.contracts.engine.owner",
            [str(tiny_ouro), str(tmp_path / "log"), str(report), "2"],
            log=log,
            environment=environment(dict(os.environ), cuda=False),
            seconds=180,
        )
    deadline = time.monotonic() + 120
    while not report.exists():
        assert owner.poll() is None and time.monotonic() < deadline, (tmp_path / "owner.log").read_text()[-2000:]
        time.sleep(0.05)
    group = int(report.read_text())
    mapped = segments(members(group))
    weights = {path for path in mapped if path.name.startswith(leftovers.WEIGHTS)}
    assert weights and mapped - weights
    owner.kill()
    owner.wait(10)
    owner.stdin.close()
    all_gone(group, mapped - weights)
    assert weights <= set(leftovers.remove_abandoned())
    all_gone(group, mapped)
