"""The processes of an engine of several: started and replaced together, called side by side, given up when lost."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from adapters.contract import EngineDead, EngineError, EngineTimeout, Health, Version, WorkerHealth
from adapters.vllm_engine.client.connection import Connection
from adapters.vllm_engine.process import messages
from adapters.vllm_engine.settings import EngineSettings, Role, TransferSettings

PROBE_SECONDS = 5.0
"""How long a restart waits for a worker to say how it is."""
SHARED = ("model", "dtype", "max_model_len", "block_size", "execution", "tensor_parallel", "staging")
"""Settings in which all workers agree: what is computed, what the KV cache looks like, how weights come."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class Worker:
    """One engine process.

    Attributes:
        settings: what it is started with, again after it was lost.
        outstanding: what it was asked and has not answered, by id; the router's.
        held_tokens: tokens of prompts, in whole blocks, that a prefill worker computes or keeps for others.
        lost: why nothing is sent to it any more.
    """

    settings: EngineSettings
    connection: Connection
    outstanding: dict[str, Any] = dataclasses.field(default_factory=dict)
    held_tokens: int = 0
    lost: EngineDead | EngineTimeout | None = None

    @property
    def role(self) -> Role:
        assert self.settings.transfer is not None
        return self.settings.transfer.role

    @property
    def usable(self) -> bool:
        return self.lost is None

    @property
    def engine_id(self) -> str:
        assert self.connection.ready is not None and self.connection.ready.engine_id is not None
        return self.connection.ready.engine_id

    @property
    def has_room(self) -> bool:
        return len(self.outstanding) < self.settings.max_num_seqs

    def takes(self, tokens: int) -> bool:
        """Whether a prompt's keys and values fit beside those that others still have to read."""
        assert self.connection.ready is not None
        return self.held_tokens == 0 or self.held_tokens + tokens <= self.connection.ready.num_cache_tokens


class Fleet:
    """
    Attributes:
        prefill, decode: the workers by role; `workers` has both.
        on_lost: called with a worker that was given up, to place again what it had.
    """

    def __init__(
        self, prefill: Sequence[EngineSettings], decode: Sequence[EngineSettings], *, transports: str, module: str
    ) -> None:
        """Starts all processes and waits until they serve.

        Raises:
            EngineStartFailed, EngineTimeout: one did not come up; the others are ended.
        """
        self._module = module
        self.on_lost: Callable[[Worker], None] = lambda worker: None
        settings = [with_role(s, "prefill", transports) for s in prefill]
        settings += [with_role(s, "decode", transports) for s in decode]
        pairs = zip(settings, self._start(settings), strict=True)
        self.workers = [Worker(settings=each, connection=connection) for each, connection in pairs]
        self.prefill, self.decode = self.workers[: len(prefill)], self.workers[len(prefill) :]

    def usable(self, workers: Sequence[Worker]) -> list[Worker]:
        """The workers that are not lost, the least loaded first.

        Raises:
            EngineDead, EngineTimeout: none is left; the error of the last one.
        """
        usable = [worker for worker in workers if worker.usable]
        if not usable:
            assert workers[-1].lost is not None
            raise workers[-1].lost
        return sorted(usable, key=lambda worker: (worker.held_tokens, len(worker.outstanding)))

    def check_whole(self) -> None:
        """Raises the error of a worker that was lost."""
        for worker in self.workers:
            if worker.lost is not None:
                raise worker.lost

    def post(self, worker: Worker, call: type[messages.Call], **fields: Any) -> None:
        """Sends a call whose reply nobody waits for. A lost worker is given up."""
        try:
            worker.connection.post(call, **fields)
        except (EngineDead, EngineTimeout) as error:
            self.give_up(worker, error)

    def call(self, worker: Worker, call: type[messages.Call], **fields: Any) -> None:
        """Calls a worker and waits until it is done. A lost worker is given up."""
        try:
            worker.connection.call(call, **fields)
        except (EngineDead, EngineTimeout) as error:
            self.give_up(worker, error)

    def everywhere(
        self,
        workers: Sequence[Worker],
        call: type[messages.Call],
        kind: Any = None,
        *,
        each: Sequence[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> list[tuple[Worker, Any]]:
        """Calls workers side by side -> each with its answer, or the exception it met. Dead ones are given up.

        Args:
            each: fields of each worker's call, besides those of all.
        """
        sent: list[int | EngineError] = []
        for i, worker in enumerate(workers):
            try:
                sent.append(worker.connection.send(call, **fields, **(each[i] if each else {})))
            except EngineError as error:
                sent.append(error)
        answers: list[tuple[Worker, Any]] = []
        for worker, call_id in zip(workers, sent, strict=True):
            try:
                if isinstance(call_id, EngineError):
                    raise call_id
                answers.append((worker, worker.connection.answer(call_id, kind)))
            except (EngineError, ValueError) as error:
                answers.append((worker, error))
        for worker, value in answers:
            if isinstance(value, EngineDead):
                self.give_up(worker, value)
        return answers

    def give_up(self, worker: Worker, error: EngineDead | EngineTimeout) -> None:
        """Ends a worker, in whatever state it is; what it had is for `on_lost`. Idempotent."""
        if worker.lost is not None:
            return
        logger.warning("%s worker %d is given up: %s", worker.role, worker.connection.pid, first_line(error))
        worker.lost = error
        worker.connection.close(ask=False)
        self.on_lost(worker)
        if worker.role == "prefill":
            self._forget_peer(worker.engine_id)

    def replace(self, workers: Sequence[Worker]) -> None:
        """Ends workers and starts others in their place, which serve their directory's weights."""
        engine_ids = [worker.engine_id for worker in workers if worker.role == "prefill"]
        for worker in workers:
            worker.connection.close(ask=False)
        for worker, connection in zip(workers, self._start([w.settings for w in workers]), strict=True):
            worker.connection, worker.lost, worker.outstanding, worker.held_tokens = connection, None, {}, 0
        for engine_id in engine_ids:
            self._forget_peer(engine_id)

    def serves(self, worker: Worker, version: Version) -> bool:
        """Whether a worker answers soon and serves this version whole. It lets go of every request."""
        if not worker.usable:
            return False
        try:
            with worker.connection.patience(PROBE_SECONDS):
                worker.connection.call(messages.Revert)
                worker.connection.call(messages.Abort, request_ids=tuple(worker.outstanding))
                health = worker.connection.call(messages.GetHealth, Health)
        except EngineError as error:
            logger.warning("%s worker %d: %s", worker.role, worker.connection.pid, first_line(error))
            return False
        return health.state != "blocked" and health.version == version

    def health(self) -> tuple[WorkerHealth, ...]:
        """Of every worker, whatever it is."""
        usable = [worker for worker in self.workers if worker.usable]
        answers = dict(self.everywhere(usable, messages.GetHealth, Health))
        return tuple(self._worker_health(worker, answers.get(worker, worker.lost)) for worker in self.workers)

    def close(self) -> None:
        """Ends every process; removes every file of theirs. Idempotent."""
        for worker in self.workers:
            worker.connection.ask_to_end()
        for worker in self.workers:
            worker.connection.close()

    def _forget_peer(self, engine_id: str) -> None:
        for worker in self.decode:
            if worker.usable:
                self.post(worker, messages.ForgetPeer, engine_id=engine_id)

    def _worker_health(self, worker: Worker, answer: Health | Exception | None) -> WorkerHealth:
        role, pid = worker.role, worker.connection.pid
        if isinstance(answer, Health):
            running = answer.num_running
            return WorkerHealth(role=role, pid=pid, state=answer.state, version=answer.version, num_running=running)
        state = "dead" if isinstance(answer, EngineDead) else "silent"
        return WorkerHealth(role=role, pid=pid, state=state, version=None)

    def _start(self, settings: Sequence[EngineSettings]) -> list[Connection]:
        connections: list[Connection] = []
        try:
            for each in settings:
                connections.append(Connection(each, self._module, wait=False))
            for connection in connections:
                connection.wait_to_serve()
        except BaseException:
            for connection in connections:
                connection.close(ask=False)
            raise
        return connections


def first_line(error: BaseException) -> str:
    """An error without the end of the log that it carries."""
    return str(error).partition("\n")[0]


def with_role(settings: EngineSettings, role: Role, transports: str) -> EngineSettings:
    """A worker's own settings. A transfer that takes half of the deadline fails before its worker counts as hung."""
    given = settings.transfer or TransferSettings(role=role, transports=transports)
    seconds = min(given.transfer_seconds, settings.deadline_seconds / 2)
    transfer = dataclasses.replace(given, role=role, transports=transports, transfer_seconds=seconds)
    return dataclasses.replace(settings, transfer=transfer)


def check_alike(prefill: Sequence[EngineSettings], decode: Sequence[EngineSettings]) -> None:
    """Raises ValueError unless there is a worker of each role, and all agree in what they share."""
    if not (prefill and decode):
        raise ValueError(f"got {len(prefill)} prefill and {len(decode)} decode workers, expected one of each or more")
    values = {name: sorted({str(getattr(s, name)) for s in (*prefill, *decode)}) for name in SHARED}
    if differing := [f"{name}: got {found}" for name, found in values.items() if len(found) > 1]:
        raise ValueError(f"prefill and decode workers: {'; '.join(differing)}, expected one value for all of them")
