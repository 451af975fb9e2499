"""Starts runs in a fraction of their usual time: forks them from a process that has imported everything.

`python -m tests.e2e.zygote` reads a JSON order per line, {"arguments": [...], "log": FILE, "status": FILE}, forks a
process that runs `tether.train` with these arguments and answers with its pid. The engines of all of them are forked by
one server. A forked run is the whole driver in a process of its own; only its imports are not repeated.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Zygote:
    """The process, from a test's side."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-m", "tests.e2e.zygote"]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self._answer() == "ready", log.read_text()

    def start(self, arguments: list[str], out: Path) -> ForkedRun:
        status = out.with_suffix(".status")
        status.unlink(missing_ok=True)
        order = {
            "arguments": [*arguments, "--out", str(out)],
            "log": str(out.with_suffix(".log")),
            "status": str(status),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return ForkedRun(int(self._answer()), out, status)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class ForkedRun:
    """One run."""

    def __init__(self, pid: int, out: Path, status: Path) -> None:
        self.pid, self._out, self._status = pid, out, status

    @property
    def is_running(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """SIGKILL, and the process is gone when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self.is_running:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def finish(self) -> None:
        """Waits for its end, which must be a good one."""
        deadline = time.monotonic() + 600
        while self.is_running:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)
        assert self._status.exists() and self._status.read_text() == "0", self.text

    @property
    def text(self) -> str:
        return self._out.with_suffix(".log").read_text()[-4000:]


def main(arguments: list[str] | None = None) -> None:
    """Serves orders until standard input ends; with arguments it does nothing, which shows that forking works."""
    if arguments is not None:
        return
    from adapters.vllm_engine.client import forkserver

    _preload()
    # A forked run is not the parent of the server and cannot ask for its state.
    forkserver._Client.alive = property(lambda _: True)  # type: ignore[method-assign, assignment]
    runs: set[int] = set()

    def reap(*_: object) -> None:
        """Runs only. Were the signal ignored, the server would ignore it too, and could not wait for engines."""
        for pid in list(runs):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    runs.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    _require_server()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        _require_server()
        if (pid := os.fork()) == 0:
            _run(order)
        runs.add(pid)
        reap()
        print(pid, flush=True)


def _require_server() -> None:
    """The server of all runs' engines, with vLLM imported and able to fork.

    A run that is killed while its engine starts takes the server along: there is nobody to tell the engine's pid.
    """
    from adapters.vllm_engine.client import forkserver
    from adapters.vllm_engine.process.main import environment

    variables = environment(dict(os.environ), cuda=False)
    with open(os.devnull, "wb") as log:
        for _ in range(2):
            try:
                forkserver.fork("tests.e2e.zygote", [], log=log, environment=variables, seconds=600).wait(60)
                return
            except OSError:
                forkserver._server = None
    raise RuntimeError("the server that forks engines cannot be started")


def _preload() -> None:
    for module in ("adapters.megatron.checkpoint", "providers.ouro.model", "tether.train"):
        importlib.import_module(module)


def _run(order: dict[str, Any]) -> None:
    """The child; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        from tether.train import main

        code = main(order["arguments"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        Path(order["status"]).write_text(str(code))
        os._exit(code)


if __name__ == "__main__":
    main()
