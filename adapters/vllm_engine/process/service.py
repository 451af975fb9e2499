"""The engine process's loop: takes calls, steps vLLM, sends results. One thread, so a publication meets no step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from adapters.clock import Clock
from adapters.contract import EngineError, GenerationResult, Health, ScoreResult
from adapters.hf_convert.directory import HFDirectory
from adapters.vllm_engine.process import messages
from adapters.vllm_engine.process.core import Core, Outcome
from adapters.vllm_engine.process.heartbeat import Heart
from adapters.vllm_engine.process.outcomes import failed
from adapters.vllm_engine.process.publication import Publication
from adapters.vllm_engine.process.transfers import StaleHandover, Transfers
from adapters.vllm_engine.settings import EngineSettings

IDLE_MILLISECONDS = 500
WAITING_MILLISECONDS = 2
"""Between two looks at keys and values that travel."""

logger = logging.getLogger("tether.engine")


class ScoreBatch:
    """Score requests of one call: answered together, in their order."""

    def __init__(self, call_id: int, request_ids: Sequence[str]) -> None:
        self.call_id, self.order = call_id, list(request_ids)
        self.done: dict[str, ScoreResult] = {}

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.order)


class Service:
    """Answers one client over a PAIR socket until told to shut down."""

    def __init__(self, settings: EngineSettings, socket: zmq.Socket[bytes], heart: Heart) -> None:
        self._socket, self._heart = socket, heart
        self.core = Core(settings)
        directory = HFDirectory(Path(settings.model))
        self.publication = Publication(
            lambda method, *args: self.core.rpc("tether_weights_call", method, *args),
            expected={name: tuple(info.shape) for name, info in directory.tensors.items()},
            dtype=str(self.core.model_config.dtype).removeprefix("torch."),
        )
        self._scores: dict[str, ScoreBatch] = {}
        self._closing, self._working = False, True
        self._handlers: dict[type, Callable[[Any], Any]] = {
            messages.Generate: self._generate,
            messages.Prefill: self._prefill,
            messages.Decode: self._decode,
            messages.Release: lambda call: self._transfers.release(call.prefill_ids),
            messages.ForgetPeer: lambda call: self._transfers.forget(call.engine_id),
            messages.Abort: self._abort,
            messages.Score: self._score,
            messages.Begin: self._begin,
            messages.Stage: lambda call: self.publication.stage(call.bucket),
            messages.Prepare: lambda call: self.publication.prepare(),
            messages.Commit: self._commit,
            messages.Settle: lambda call: self.publication.settle(),
            messages.Revert: lambda call: self.publication.revert(self.core.drop_caches),
            messages.AbortPublication: lambda call: self.publication.abort(),
            messages.GetHealth: self._health,
            messages.GetCounters: lambda call: self.core.rpc("tether_counters")[0],
            messages.Shutdown: self._shutdown,
        }

    def run(self) -> None:
        """Serves until Shutdown. An error inside vLLM's step ends the process: its state is not to be trusted.

        Raises:
            RuntimeError: a worker process died.
        """
        self._send(self._ready())
        while not self._closing:
            wait = IDLE_MILLISECONDS if not self.core.is_busy else 0 if self._working else WAITING_MILLISECONDS
            while not self._closing and self._socket.poll(wait):
                self._answer(messages.decode_call(self._socket.recv()))
                wait = 0
            if self.core.is_busy and not self._closing:
                self._step()

    def _ready(self) -> messages.Ready:
        ready = messages.Ready(pid=os.getpid(), trace_kind=self.core.trace_kind)
        if (transfers := self.core.transfers) is None:
            return ready
        return msgspec.structs.replace(
            ready, engine_id=transfers.engine_id, num_cache_tokens=transfers.num_cache_tokens
        )

    def _step(self) -> None:
        outcomes, arrivals = self.core.step(self.publication.version), self.core.take_arrivals()
        for request_id, num_bytes in arrivals:
            self._send(messages.Arrived(request_id=request_id, num_bytes=num_bytes))
        self._deliver(outcomes)
        # Waiting for another engine's keys and values is no progress: whoever waits for this one must see that.
        self._working = (
            bool(outcomes or arrivals) or self.core.transfers is None or self.core.transfers.num_scheduled > 0
        )
        if self._working:
            self._heart.progress()

    def _answer(self, call: messages.AnyCall) -> None:
        try:
            value = self._handlers[type(call)](call)
        except (EngineError, ValueError) as error:
            self.core.check_workers()
            self._send(messages.Failure(call_id=call.call_id, error=type(error).__name__, message=str(error)))
            return
        finally:
            self._heart.progress()
        if not isinstance(call, messages.Score):  # answered when the last one is done
            self._send(messages.Reply(call_id=call.call_id, value=value))

    def _generate(self, call: messages.Generate) -> None:
        self.publication.check_serving()
        for request in call.requests:
            try:
                self.core.add(request)
            except Exception as error:  # one bad request must not fail the others
                self._deliver([failed(request, error, self.publication.version)])

    @property
    def _transfers(self) -> Transfers:
        if self.core.transfers is None:
            raise ValueError("this engine passes no keys and values on: it was started without `transfer` settings")
        return self.core.transfers

    def _prefill(self, call: messages.Prefill) -> None:
        self.publication.check_serving()
        for request in call.requests:
            try:
                self.core.add_prefill(request)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self._send(messages.Prefilled(request_id=request.request_id, error=message))

    def _decode(self, call: messages.Decode) -> None:
        self.publication.check_serving()
        for request, handover in zip(call.requests, call.handovers, strict=True):
            try:
                self.core.add_decode(request, handover, call.readers, self.publication.version)
            except StaleHandover as error:
                self._send(messages.Lost(request_id=request.request_id, reason=str(error)))
            except Exception as error:
                self._deliver([failed(request, error, self.publication.version)])

    def _abort(self, call: messages.Abort) -> None:
        self._deliver(self.core.abort(call.request_ids, self.publication.version))

    def _score(self, call: messages.Score) -> None:
        self.publication.check_serving()
        batch = ScoreBatch(call.call_id, [r.request_id for r in call.requests])
        for request in call.requests:
            self._scores[request.request_id] = batch
            try:
                self.core.add_score(request)
            except Exception as error:
                self._deliver([failed(request, error, self.publication.version)])
        if not call.requests:
            self._send(messages.Reply(call_id=call.call_id, value=[]))

    def _begin(self, call: messages.Begin) -> bool:
        self.publication.revert(self.core.drop_caches)  # a commit that nobody settled
        return self.publication.begin(call.version, call.manifest)

    def _commit(self, call: messages.Commit) -> dict[str, float]:
        """-> how long its parts took, in seconds: what was in flight, and the first worker's own."""
        clock = Clock()
        if call.in_flight == "abort":
            self._deliver(self.core.abort_all(self.publication.version))
        while self.core.num_running:
            self._step()
        if self.core.transfers is not None:
            self.core.transfers.let_go()
        clock.lap("drain")
        self.publication.commit(self.core.drop_caches, hold=call.hold)
        logger.info("version %s is served%s", self.publication.version, ", the next one is loaded" * call.hold)
        return clock.seconds | self.core.rpc("tether_weights_call", "seconds")[0]

    def _health(self, call: messages.GetHealth) -> Health:
        publication = self.publication
        state = "blocked" if publication.blocked else "publishing" if publication.running else "serving"
        return Health(
            state=state,  # type: ignore[arg-type]
            version=publication.version,
            num_running=self.core.num_running,
            pid=os.getpid(),
            reason=publication.blocked,
        )

    def _shutdown(self, call: messages.Shutdown) -> None:
        self._closing = True

    def _deliver(self, results: Sequence[Outcome]) -> None:
        for result in results:
            if isinstance(result, GenerationResult):
                self._send(messages.Result(result=result))
                continue
            if not isinstance(result, ScoreResult):
                self._send(result)
                continue
            batch = self._scores.pop(result.request_id)
            batch.done[result.request_id] = result
            if batch.complete:
                self._send(messages.Reply(call_id=batch.call_id, value=[batch.done[r] for r in batch.order]))

    def _send(self, answer: messages.AnyAnswer) -> None:
        self._socket.send(messages.encode(answer))
