"""The engine process as its client sees it: started, spoken to with deadlines, supervised, ended.

Three things can happen to a wait, all in bounded time: the process ends (`EngineDead` or a kind of it), its heart stops
(`EngineTimeout` after `heartbeat_seconds`), or it lives on without finishing anything (`EngineTimeout` after
`deadline_seconds`). A process that works, however long, is waited for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from adapters.contract import EngineDead, EngineStartFailed, EngineTimeout, GenerationResult
from adapters.vllm_engine.client.launch import Process, start_process
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.process import messages
from adapters.vllm_engine.process.heartbeat import Pulse
from adapters.vllm_engine.process.main import STATUS
from adapters.vllm_engine.settings import EngineSettings

POLL_MILLISECONDS = 100
END_SECONDS = 10.0
LOG_LINES = 30


class Connection:
    """
    Attributes:
        ready: what the process said when it began to serve.
        results: of generation, as they came.
        events: what else an engine that passes prompts on, or gets them, has to say.
    """

    def __init__(self, settings: EngineSettings, module: str, *, wait: bool = True) -> None:
        """Starts `module` and waits until it serves, or (not `wait`) leaves that to `wait_to_serve`.

        Raises:
            EngineStartFailed: it ended while starting; the message shows its log.
            EngineTimeout: it did not come up within `settings.start_seconds`.
        """
        self.settings = settings
        self.results: deque[GenerationResult] = deque()
        self.events: deque[messages.Prefilled | messages.Arrived | messages.Lost] = deque()
        self.ready: messages.Ready | None = None
        self._progress, self._waits_since = 0, 0.0
        self._answers: dict[int, messages.Reply | messages.Failure | None] = {}
        self._posted: set[int] = set()
        self._failures: deque[messages.Failure] = deque()
        self._calls = itertools.count(1)
        self._directory = Path(tempfile.gettempdir()) / leftovers.owned_name(leftovers.ENGINE)
        self._directory.mkdir(mode=0o700)
        self._pulse = Pulse(self._directory / "heartbeat")
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.bind(f"ipc://{self._directory}/socket")
        try:
            self._process = self._start(module)
        except OSError as error:
            self._clean()
            raise EngineStartFailed(f"engine: could not start a process: {error!r}; {self._log_tail()}") from error
        if wait:
            self.wait_to_serve()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """To be polled together with others."""
        return self._socket

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, call: type[messages.Call], kind: Any = None, **fields: Any) -> Any:
        """Sends a call and waits for its answer, converted to `kind`.

        Raises:
            EngineError: what the process raised, or that it died or fell silent.
        """
        return self.answer(self.send(call, **fields), kind)

    def answer(self, call_id: int, kind: Any = None) -> Any:
        """Waits for the answer to what was sent, converted to `kind`. Raises what `call` does."""
        try:
            self.wait_for(lambda: self._answers[call_id], f"the answer to call {call_id}")
        finally:
            answer = self._answers.pop(call_id)  # an answer that comes later belongs to nobody
        if isinstance(answer, messages.Failure):
            messages.raise_failure(answer)
        assert isinstance(answer, messages.Reply)
        return answer.value if kind is None else msgspec.convert(answer.value, kind)

    def call_all(self, calls: Sequence[tuple[type[messages.Call], dict[str, Any]]]) -> None:
        """Sends calls at once and waits until all are done. Raises the first error; later answers belong to nobody."""
        sent: list[int] = []
        try:
            for call, fields in calls:
                sent.append(self.send(call, **fields))
            for call_id in sent:
                self.answer(call_id)
        finally:
            for call_id in sent:
                self._answers.pop(call_id, None)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Deadlines of at most so many seconds."""
        settings = self.settings
        deadlines = {n: min(seconds, getattr(settings, n)) for n in ("deadline_seconds", "heartbeat_seconds")}
        self.settings = dataclasses.replace(settings, **deadlines)
        try:
            yield
        finally:
            self.settings = settings

    def send(self, call: type[messages.Call], **fields: Any) -> int:
        """Sends a call whose answer is taken with `answer`.

        Raises:
            EngineDead, EngineTimeout: the process ended, or takes nothing for too long.
        """
        self.check_alive()
        call_id = next(self._calls)
        self._send(messages.encode(call(call_id=call_id, **fields)))
        self._answers[call_id] = None
        return call_id

    def _send(self, frame: bytes) -> None:
        # A process that was killed may be gone from the socket before it counts as ended: a plain send waits for ever.
        def sent() -> bool:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return False
            return True

        if sent():
            return
        self.begin_wait()
        while not sent():
            self._socket.poll(POLL_MILLISECONDS, zmq.POLLOUT)
            self.check_wait("room for a call")

    def post(self, call: type[messages.Call], **fields: Any) -> None:
        """Sends a call whose reply nobody waits for. Should it fail, the next `take_failure` raises it."""
        self._posted.add(call_id := self.send(call, **fields))
        del self._answers[call_id]

    def take_failure(self) -> None:
        """Raises the first error that a posted call met, once."""
        if self._failures:
            messages.raise_failure(self._failures.popleft())

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Reads answers until the condition holds."""
        self.begin_wait()
        while not condition():
            if not self.read(POLL_MILLISECONDS):
                self.check_wait(what)

    def begin_wait(self) -> None:
        """Something is waited for from now on: `deadline_seconds` begin to run."""
        self._progress, self._waits_since = self._pulse.progress, time.monotonic()

    def check_wait(self, what: str) -> None:
        """Raises EngineDead if the process ended, EngineTimeout if it is silent or finished nothing for too long."""
        self.check_alive()
        if (silence := self._pulse.seconds_since_beat) > self.settings.heartbeat_seconds:
            raise EngineTimeout(f"engine {self.pid}: no heartbeat for {silence:.0f} s, waiting for {what}")
        if self._progress != self._pulse.progress:
            self.begin_wait()
        if time.monotonic() > self._waits_since + (seconds := self.settings.deadline_seconds):
            raise EngineTimeout(f"engine {self.pid}: waited {seconds:.0f} s for {what}; {self._log_tail()}")

    def check_alive(self) -> None:
        if (status := self._process.poll()) is not None:
            kind = STATUS.get(status, EngineDead if self.ready else EngineStartFailed)
            raise kind(f"engine {self.pid} ended with status {status}; {self._log_tail()}")

    def ask_to_end(self) -> None:
        """Tells the process to end itself, and does not wait. `close` does."""
        if not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):
                shutdown = messages.Shutdown(call_id=next(self._calls))
                self._socket.send(messages.encode(shutdown), zmq.NOBLOCK)

    def close(self, *, ask: bool = True) -> None:
        """Ends the process and its workers, politely first if `ask`; removes its files. Idempotent."""
        if self._socket.closed:
            return
        if ask and self.alive:
            self.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_SECONDS)
        self._end_group()
        if self._process.stdin:
            self._process.stdin.close()
        self._clean()

    def _start(self, module: str) -> Process:
        settings = self.settings
        arguments = ["--directory", str(self._directory), "--settings", settings.to_json()]
        return start_process(
            module,
            arguments,
            log_path=settings.log_path,
            start_method=settings.start_method,
            seconds=settings.start_seconds,
        )

    def wait_to_serve(self) -> messages.Ready:
        """Raises what the constructor does; then the process is gone."""
        deadline = time.monotonic() + self.settings.start_seconds
        try:
            while self.ready is None:
                if not self.read(POLL_MILLISECONDS):
                    self.check_alive()
                if time.monotonic() > deadline:
                    seconds = self.settings.start_seconds
                    raise EngineTimeout(f"engine {self.pid}: did not serve after {seconds:.0f} s; {self._log_tail()}")
        except BaseException:
            self.close(ask=False)
            raise
        return self.ready

    def read(self, milliseconds: int) -> bool:
        """Takes one answer, waiting for it so long. False if none came."""
        if not self._socket.poll(milliseconds):
            return False
        answer = messages.decode_answer(self._socket.recv())
        if isinstance(answer, messages.Result):
            self.results.append(answer.result)
        elif isinstance(answer, messages.Ready):
            self.ready = answer
        elif not isinstance(answer, messages.Reply | messages.Failure):
            self.events.append(answer)
        elif answer.call_id in self._answers:
            self._answers[answer.call_id] = answer
        elif answer.call_id in self._posted:
            self._posted.remove(answer.call_id)
            if isinstance(answer, messages.Failure):
                self._failures.append(answer)
        return True

    def _end_group(self) -> None:
        """Kills the process, lets its workers notice, and kills those that do not.

        They are continued first: a stopped worker would notice nothing. vLLM's resource tracker is in the group too and
        removes the workers' shared memory when the last of them is gone.
        """
        if self.alive:
            self._process.kill()
            self._process.wait(timeout=END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, signal.SIGCONT)
                time.sleep(0.02)
            os.killpg(self.pid, signal.SIGKILL)

    def _clean(self) -> None:
        self._socket.close(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _log_tail(self) -> str:
        lines = self.settings.log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"the end of {self.settings.log_path}:\n" + "\n".join(lines)
