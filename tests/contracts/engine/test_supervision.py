"""An engine never outlives its owner, and its death, silence or failure to start is a typed error in bounded time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from adapters.contract import (
    EngineDead,
    EngineOutOfMemory,
    EngineStartFailed,
    EngineTimeout,
    PluginMissing,
    SamplingParams,
)
from adapters.vllm_engine.client import forkserver
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.process.main import environment
from tests.tiny import write_ouro
from tether.recovery import MAX_RESTARTS, with_restarts

from . import faults
from .conftest import drawn, make_requests, next_version, run, settings_for


@pytest.fixture
def fault_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.fixture(scope="module")
def own_engine(tiny_ouro: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with short deadlines whose process has faults to order; tests may leave it dead (`alive`)."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, str(folder / "fault"))
        settings = settings_for(tiny_ouro, folder / "log", deadline_seconds=3, heartbeat_seconds=2)
        with LocalEngine(settings, module=faults.MODULE) as engine:
            yield engine


@pytest.fixture
def alive(own_engine: Any) -> Any:
    try:
        own_engine.health()
    except EngineDead:
        own_engine.restart()
    return own_engine


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def owned_by(pid: int) -> list[str]:
    folders = (leftovers.memory_directory(), Path("/tmp"))
    return [path.name for folder in folders for path in folder.glob(f"tether-*-{pid}-*")]


def test_kill_9_of_the_owner_leaves_nothing_that_stays(tiny_ouro: Path, tmp_path: Path) -> None:
    """The engine notices its closed pipe and ends by itself; the next start removes the owner's files."""
    report = tmp_path / "report"
    with open(tmp_path / "owner.log", "ab") as log:
        owner = forkserver.fork(
            "tests.contracts.engine.owner",
            [str(tiny_ouro), str(tmp_path / "log"), str(report)],
            log=log,
            environment=environment(dict(os.environ), cuda=False),
            seconds=180,
        )
    deadline = time.monotonic() + 120
    while not report.exists():
        assert owner.poll() is None and time.monotonic() < deadline, (tmp_path / "owner.log").read_text()[-2000:]
        time.sleep(0.05)
    pid = int(report.read_text())
    assert Path(f"/proc/{pid}").exists() and owned_by(owner.pid)
    owner.kill()
    owner.wait(10)
    assert gone_within(pid, 10)
    assert {path.name for path in leftovers.remove_abandoned()} >= set(owned_by(owner.pid))
    assert owned_by(owner.pid) == []
    owner.stdin.close()


def test_a_stopped_process_is_found_by_its_heart(alive: Any) -> None:
    """No heartbeat: EngineTimeout before the deadline of an answer; continued, it serves as before."""
    expected = run(alive, make_requests("x", 2))
    os.kill(alive.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match="no heartbeat"):
        alive.health()
    assert time.monotonic() - started < 3.5
    os.kill(alive.pid, signal.SIGCONT)
    assert alive.health().state == "serving"
    assert drawn(run(alive, make_requests("y", 2))) == drawn(expected)


def test_a_process_that_waits_for_ever_is_told_from_one_that_works(alive: Any) -> None:
    """Beating without finishing anything: EngineTimeout after the deadline. Longer work with progress is waited for."""
    faults.order(("generate", "stall"))
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match="waited 3 s for the next result"):
        run(alive, make_requests("stalled", 1))
    assert time.monotonic() - started < 6
    time.sleep(faults.STALL_SECONDS - 3)
    results = run(alive, make_requests("stalled", 1))  # the same id: what was left of it has been ended
    assert results[0].finish_reason == "length"
    long = make_requests("long", 8, sampling=SamplingParams(max_tokens=190, ignore_eos=True))
    assert len(run(alive, [*long, *make_requests("more", 8)])) == 16


def test_a_killed_process_is_dead_and_comes_back_at_the_committed_version(alive: Any, tmp_path: Path) -> None:
    """kill -9 while generating: EngineDead with the log's end. `restart` serves the version that was published last."""
    version = next_version(alive)
    alive.publish(version, load_file(write_ouro(tmp_path, seed=1) / "model.safetensors"))
    expected = drawn(run(alive, make_requests("a", 2)))
    long = make_requests("z", 4, sampling=SamplingParams(max_tokens=150, ignore_eos=True))
    stream = alive.generate([*long, *make_requests("short", 1)])
    next(stream)
    os.kill(alive.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="status -9"):
        list(stream)
    alive.restart()
    assert alive.weight_version() == version
    assert drawn(run(alive, make_requests("b", 2))) == expected


def test_a_call_to_a_process_whose_end_is_not_known_yet_ends_too(alive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves the socket before it counts as ended; a call in between is an error, and no hang."""
    process, asked = alive._connection._process, []
    poll = process.poll

    def late() -> int | None:
        asked.append(poll())
        return asked[-1] if len(asked) > 5 else None

    monkeypatch.setattr(process, "poll", late)
    os.kill(process.pid, signal.SIGKILL)
    assert gone_within(process.pid, 10)
    time.sleep(0.5)  # the socket has noticed
    errors: list[BaseException] = []

    def call() -> None:
        try:
            alive.health()
        except BaseException as error:
            errors.append(error)

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(timeout=30)
    assert [type(error) for error in errors] == [EngineDead] and len(asked) > 5, (errors, asked)


def test_the_driver_goes_on_a_bounded_number_of_times(alive: Any, tiny_ouro: Path) -> None:
    """A rollout and a publication that kill the engine once are repeated exactly; one that always does is an error."""
    expected = drawn(run(alive, make_requests("undisturbed", 2)))
    faults.order(("generate", "kill"))
    assert with_restarts(alive, lambda: drawn(run(alive, make_requests("again", 2)))) == expected

    version, tensors = next_version(alive), iter(load_file(tiny_ouro / "model.safetensors").items())
    faults.order(("commit", "kill"))
    with_restarts(alive, lambda: alive.publish(version, tensors), again=alive.republish)
    assert alive.weight_version() == version and list(tensors) == []
    published = drawn(run(alive, make_requests("published", 2)))

    faults.order(*[("generate", "kill")] * (MAX_RESTARTS + 1))
    with pytest.raises(EngineDead):
        with_restarts(alive, lambda: run(alive, make_requests("hopeless", 1)))
    assert faults.withdraw() == []
    alive.restart()
    assert drawn(run(alive, make_requests("after", 2))) == published


def test_out_of_memory_is_said(alive: Any, tiny_ouro: Path, tmp_path: Path) -> None:
    """An allocation that fails ends the process with its own error; a cache that cannot fit is refused by vLLM."""
    faults.order(("generate", "memory"))
    with pytest.raises(EngineOutOfMemory, match="memory"):
        run(alive, make_requests("m", 1))
    with pytest.raises(EngineStartFailed, match="less than requested memory for kv"):
        LocalEngine(settings_for(tiny_ouro, tmp_path / "log", kv_cache_bytes=1 << 50))


def test_an_engine_that_cannot_start_says_why(tiny_ouro: Path, tmp_path: Path, fault_file: Path) -> None:
    """A wrong directory, a plugin that did not load, a process killed or stuck while starting: each its own error."""
    with pytest.raises(EngineStartFailed, match="no-such-model"):
        LocalEngine(settings_for(tmp_path / "no-such-model", tmp_path / "log"))
    before = owned_by(os.getpid())
    for fault, kind in (("no plugin", PluginMissing), ("kill", EngineStartFailed), ("stop", EngineTimeout)):
        faults.order(("start", fault))
        with pytest.raises(kind):
            seconds = 2 if fault == "stop" else 120
            LocalEngine(settings_for(tiny_ouro, tmp_path / "log", start_seconds=seconds), module=faults.MODULE)
    assert owned_by(os.getpid()) == before


def test_a_spawned_engine_is_the_same(alive: Any, tiny_ouro: Path, tmp_path: Path) -> None:
    """`start_method="spawn"`, what CUDA needs: same outputs. Closing ends the process and removes its folder, twice."""
    alive.publish(next_version(alive), load_file(tiny_ouro / "model.safetensors"))
    spawned = LocalEngine(settings_for(tiny_ouro, tmp_path / "log", start_method="spawn"))
    assert drawn(run(spawned, make_requests("a", 2))) == drawn(run(alive, make_requests("b", 2)))
    pid, before = spawned.pid, owned_by(os.getpid())
    spawned.close()
    spawned.close()
    assert gone_within(pid, 1) and len(owned_by(os.getpid())) == len(before) - 1
    with pytest.raises(EngineDead):
        spawned.health()
