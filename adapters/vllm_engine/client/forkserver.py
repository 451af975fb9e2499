"""A process that has vLLM imported and forks engine processes, so that an engine starts in seconds.

One server per client process, started with its first engine and ended with the client (its control socket closes). It
never starts a thread or touches a device, which is what makes forking it safe; engines on CUDA are spawned instead.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

_MESSAGE_BYTES = 1 << 20
_POLL_SECONDS = 0.02
_server: _Client | None = None


def fork(
    module: str, arguments: Sequence[str], *, log: IO[bytes], environment: Mapping[str, str], seconds: float
) -> ForkedProcess:
    """Runs `module.main(arguments)` in a fork of the server, in a session of its own.

    Args:
        log: gets its output, and the server's own when this call starts the server.
        environment: of the new process. What vLLM reads while it is imported is the first call's.
        seconds: longest wait for the server, which the first call starts.

    Raises:
        OSError: the server ended or did not answer in time; it says why in the log.
    """
    global _server
    if _server is None or not _server.alive:
        _server = _Client(log, environment)
    return _server.fork(module, arguments, log, environment, seconds)


class ForkedProcess:
    """What the client sees of a forked process: the part of `subprocess.Popen` that supervision needs.

    Attributes:
        stdin: write end of its standard input; a process that watches it ends when this end closes.
    """

    def __init__(self, pid: int, stdin: IO[bytes], status: socket.socket) -> None:
        self.pid, self.stdin, self._status = pid, stdin, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. 255 if the server died and cannot tell."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self.returncode = int(self._status.recv(64) or b"255")
                self._status.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Client:
    """This process's end of the server."""

    def __init__(self, log: IO[bytes], environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adapters.vllm_engine.client.forkserver"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,  # a Ctrl-C is the client's to handle
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        log: IO[bytes],
        environment: Mapping[str, str],
        seconds: float,
    ) -> ForkedProcess:
        order = json.dumps({"module": module, "arguments": list(arguments), "environment": dict(environment)}).encode()
        stdin, write = os.pipe()
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            status.settimeout(seconds)
            socket.send_fds(self._control, [order], [stdin, log.fileno(), theirs.fileno()])
            theirs.close()
            if not (pid := status.recv(64)):  # it comes when the server has imported vLLM
                raise ChildProcessError("the server that forks engines ended")
        except OSError:
            os.close(write)
            status.close()
            raise
        finally:
            os.close(stdin)
            theirs.close()
        status.setblocking(False)
        return ForkedProcess(int(pid), os.fdopen(write, "wb", buffering=0), status)


def _serve(control: socket.socket) -> None:
    """Forks on request and reports exits, until the client's end closes."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    _report(key.fd, *key.data)
                    continue
                order, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
                if not order:
                    return
                stdin, log, status = descriptors
                if (pid := os.fork()) == 0:
                    selector.close()
                    control.close()
                    os.close(status)
                    _become(json.loads(order), stdin, log)
                os.close(stdin)
                os.close(log)
                report = socket.socket(fileno=status)
                report.send(str(pid).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))


def _report(pidfd: int, pid: int, report: socket.socket) -> None:
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    with report, contextlib.suppress(OSError):  # the client may no longer want to know
        report.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(order: dict, stdin: int, log: int) -> None:
    """The child: its own session, standard streams and environment; never returns."""
    code = 1
    try:
        os.setsid()
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(stdin)
        os.close(log)
        os.environ.clear()
        os.environ.update(order["environment"])
        importlib.import_module(order["module"]).main(order["arguments"])
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _preload() -> None:
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import adapters.vllm_engine.process.service  # noqa: F401


if __name__ == "__main__":
    _preload()
    _serve(socket.socket(fileno=os.dup(0)))
