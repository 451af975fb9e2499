"""LocalEngine: vLLM in a process of its own on this machine, behind the engine contract.

The process is started here, supervised by its pid, spoken to over a Unix socket, and ends when this process does. Every
wait has a deadline; a process that died is an error that shows the last lines of its log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import zmq

from adapters.contract import (
    EngineDead,
    EngineTimeout,
    GenerationRequest,
    GenerationResult,
    Health,
    PublishReport,
    ScoreRequest,
    ScoreResult,
    Version,
)
from adapters.hf_convert.manifest import manifest_of

from . import messages, shared_memory
from .process import environment
from .settings import EngineSettings

POLL_MILLISECONDS = 200
LOG_LINES = 30


class LocalEngine:
    """A running engine. Use as a context manager, or call `close`. Not for use from several threads."""

    def __init__(self, settings: EngineSettings) -> None:
        """Starts the process and waits until it serves.

        Raises:
            EngineDead: the process ended while starting; the message shows its log.
            EngineTimeout: it did not come up within `settings.start_seconds`.
        """
        self.settings = settings
        self._calls = itertools.count(1)
        self._results: deque[GenerationResult] = deque()
        self._answers: dict[int, messages.Reply | messages.Failure] = {}
        self._ready: messages.Ready | None = None
        shared_memory.remove_abandoned()
        self._directory = Path(tempfile.mkdtemp(prefix="tether-engine-"))
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.bind(address := f"ipc://{self._directory}/socket")
        self._process = self._start(address)
        try:
            self._wait_for(lambda: self._ready, settings.start_seconds, "start")
        except BaseException:
            self.close()
            raise

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        self.settings.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "adapters.vllm_engine.process"]
        command += ["--address", address, "--settings", self.settings.to_json()]
        with open(self.settings.log_path, "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(dict(os.environ), cuda=torch.cuda.is_available()),
            )

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def trace_kind(self) -> str:
        assert self._ready is not None
        return self._ready.trace_kind

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See `contract.Engine.generate`. Sent when iteration starts; what is not consumed is aborted."""
        pending = {r.request_id for r in requests}
        if len(pending) != len(requests):
            raise ValueError("generate: two requests share an id; results could not be told apart")
        self._results.clear()
        self._call(messages.Generate(call_id=next(self._calls), requests=tuple(requests)))
        try:
            while pending:
                self._wait_for(lambda: self._results, self.settings.deadline_seconds, "the next result")
                while self._results:
                    result = self._results.popleft()
                    pending.discard(result.request_id)
                    yield result
        finally:
            if pending and self._process.poll() is None:
                self.abort(pending)
                self._results.clear()

    def abort(self, request_ids: Iterable[str]) -> None:
        self._call(messages.Abort(call_id=next(self._calls), request_ids=tuple(request_ids)))

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        if len({r.request_id for r in requests}) != len(requests):
            raise ValueError("score: two requests share an id")
        return self._call(messages.Score(call_id=next(self._calls), requests=tuple(requests)), list[ScoreResult])

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        in_flight: Literal["drain", "abort"] = "drain",
    ) -> PublishReport:
        """See `contract.Engine.publish`. Tensors are copied once, into shared memory that the workers map.

        Args:
            in_flight: what happens to running requests before commit: they finish, or end with what they have.
        """
        clock = _Clock()
        buckets: list[shared_memory.Bucket] = []
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        try:
            buckets.extend(shared_memory.write_buckets(pairs))
            clock.lap("gather")
            manifest = manifest_of(pair for bucket in buckets for pair in shared_memory.map_bucket(bucket))
            clock.lap("digest")
            if not self._call(messages.Begin(call_id=next(self._calls), version=version, manifest=manifest), bool):
                self._transact(buckets, in_flight, clock)
        finally:
            shared_memory.remove_buckets(buckets)
        return PublishReport(
            version=version,
            manifest_digest=manifest.digest,
            num_bytes=sum(bucket.num_bytes for bucket in buckets),
            seconds=clock.seconds,
        )

    def _transact(
        self, buckets: Sequence[shared_memory.Bucket], in_flight: Literal["drain", "abort"], clock: _Clock
    ) -> None:
        for bucket in buckets:
            self._call(messages.Stage(call_id=next(self._calls), bucket=bucket))
        clock.lap("stage")
        self._call(messages.Prepare(call_id=next(self._calls)))
        clock.lap("prepare")
        self._call(messages.Commit(call_id=next(self._calls), in_flight=in_flight))
        clock.lap("commit")

    def weight_version(self) -> Version:
        return self.health().version

    def health(self) -> Health:
        return self._call(messages.GetHealth(call_id=next(self._calls)), Health)

    def counters(self) -> dict[str, int]:
        """Layer executions, tokens in them and records held, of the first worker since its start."""
        return self._call(messages.GetCounters(call_id=next(self._calls)))

    def close(self) -> None:
        """Asks the process to end, then makes it; removes its socket. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(messages.encode(messages.Shutdown(call_id=next(self._calls))), zmq.NOBLOCK)
            self._end_process()
        if self._process.stdin:
            self._process.stdin.close()
        self._socket.close(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end_process(self) -> None:
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
                return

    def _call(self, call: messages.AnyCall, kind: Any = None) -> Any:
        self._check_alive()
        self._socket.send(messages.encode(call))
        what = type(call).__name__
        self._wait_for(lambda: call.call_id in self._answers, self.settings.deadline_seconds, f"the answer to {what}")
        answer = self._answers.pop(call.call_id)
        if isinstance(answer, messages.Failure):
            messages.raise_failure(answer)
        return answer.value if kind is None else msgspec.convert(answer.value, kind)  # type: ignore[union-attr]

    def _wait_for(self, condition: Any, seconds: float, what: str) -> None:
        """Reads answers until the condition holds. The process's death or the deadline ends the wait."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self._socket.poll(POLL_MILLISECONDS):
                self._receive(messages.decode_answer(self._socket.recv()))
                continue
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineTimeout(f"engine {self.pid}: waited {seconds:.0f} s for {what}; {self._log_tail()}")

    def _receive(self, answer: messages.AnyAnswer) -> None:
        if isinstance(answer, messages.Result):
            self._results.append(answer.result)
        elif isinstance(answer, messages.Ready):
            self._ready = answer
        else:
            self._answers[answer.call_id] = answer

    def _check_alive(self) -> None:
        if (status := self._process.poll()) is not None:
            raise EngineDead(f"engine {self.pid} ended with status {status}; {self._log_tail()}")

    def _log_tail(self) -> str:
        lines = self.settings.log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"the end of {self.settings.log_path}:\n" + "\n".join(lines)


class _Clock:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
