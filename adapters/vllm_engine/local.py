"""LocalEngine: vLLM in a process of its own on this machine, behind the engine contract.

The process is started here, supervised, spoken to over a Unix socket (`connection`), and ends when this process does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from adapters.contract import (
    EngineDead,
    EngineTimeout,
    GenerationRequest,
    GenerationResult,
    Health,
    Manifest,
    PublishReport,
    ScoreRequest,
    ScoreResult,
    TensorSpec,
    Version,
)

from . import leftovers, messages, shared_memory
from .connection import Connection
from .settings import EngineSettings

PROCESS = "adapters.vllm_engine.process"
InFlight = Literal["drain", "abort"]

logger = logging.getLogger(__name__)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A version, whole, in the buckets that it is published with.

    Those of the version that is served are kept: they are what a restarted engine is given. They cost nothing while the
    engine runs, because its workers hold the same pages to roll back to.
    """

    version: Version
    manifest: Manifest
    buckets: tuple[shared_memory.Bucket, ...]


class LocalEngine:
    """A running engine. Use as a context manager, or call `close`. Not for use from several threads."""

    def __init__(self, settings: EngineSettings, *, module: str = PROCESS) -> None:
        """Starts the process and waits until it serves.

        Args:
            module: what runs in it. Tests pass one that breaks something first.

        Raises:
            EngineStartFailed: the process ended while starting; the message shows its log.
            EngineTimeout: it did not come up within `settings.start_seconds`.
        """
        self.settings, self._module = settings, module
        self._committed: Offer | None = None
        self._interrupted: Offer | None = None
        self._unread: set[str] = set()
        if removed := leftovers.remove_abandoned():
            logger.info("removed what killed processes left behind: %s", sorted(str(path) for path in removed))
        self._connection = Connection(settings, module)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._connection.pid

    @property
    def trace_kind(self) -> str:
        assert self._connection.ready is not None
        return self._connection.ready.trace_kind

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See `contract.Engine.generate`. Sent when iteration starts; what is not consumed is aborted."""
        pending = {r.request_id for r in requests}
        if len(pending) != len(requests):
            raise ValueError("generate: two requests share an id; results could not be told apart")
        self._forget_unread()
        results, self._unread = self._connection.results, pending
        self._connection.call(messages.Generate, requests=tuple(requests))
        try:
            while pending:
                self._connection.wait_for(lambda: results, "the next result")
                while results:
                    result = results.popleft()
                    pending.discard(result.request_id)
                    yield result
        except GeneratorExit:
            self._forget_unread()
            raise

    def _forget_unread(self) -> None:
        """Ends requests of an earlier call that nobody reads any more, and drops what they became."""
        if self._unread:
            self.abort(self._unread)
            self._unread = set()
        self._connection.results.clear()

    def abort(self, request_ids: Iterable[str]) -> None:
        self._connection.call(messages.Abort, request_ids=tuple(request_ids))

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        if len({r.request_id for r in requests}) != len(requests):
            raise ValueError("score: two requests share an id")
        return self._connection.call(messages.Score, list[ScoreResult], requests=tuple(requests))

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        in_flight: InFlight = "drain",
    ) -> PublishReport:
        """See `contract.Engine.publish`. Tensors are copied once, into shared memory that the workers map.

        After EngineDead or EngineTimeout the tensors are kept in shared memory: `restart` and `republish` go on with
        them. Publishing again is right as well: if the commit had reached the engine, it is accepted as done.

        Args:
            in_flight: what happens to running requests before commit: they finish, or end with what they have.
        """
        clock = Clock()
        buckets: list[shared_memory.Bucket] = []
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._drop_interrupted()
        try:
            specs: list[TensorSpec] = []
            for bucket, described in shared_memory.write_buckets(pairs):
                buckets.append(bucket)
                specs += described
        except BaseException:
            shared_memory.remove_buckets(buckets)
            raise
        clock.lap("write")
        offered = Offer(version=version, manifest=Manifest(tensors=tuple(specs)), buckets=tuple(buckets))
        return self._offer(offered, in_flight, clock)

    def republish(self) -> PublishReport:
        """Offers again what EngineDead or EngineTimeout interrupted, from shared memory.

        Raises:
            ValueError: no publication was interrupted.
        """
        if self._interrupted is None:
            raise ValueError("republish: no publication was interrupted")
        offered, self._interrupted = self._interrupted, None
        return self._offer(offered, "drain", Clock())

    def restart(self) -> None:
        """Ends the process, in whatever state it is, and starts another that serves the version committed last.

        Requests that were running are lost. An engine to which nothing was published starts from its directory again.
        """
        self._connection.close(ask=False)
        self._unread = set()
        self._connection = Connection(self.settings, self._module)
        if self._committed is not None:
            self._transact(self._committed, "drain", Clock())
        logger.warning("the engine was restarted as pid %d", self.pid)

    def weight_version(self) -> Version:
        return self.health().version

    def health(self) -> Health:
        return self._connection.call(messages.GetHealth, Health)

    def counters(self) -> dict[str, int]:
        """Layer executions, tokens in them and records held, of the first worker since its start."""
        return self._connection.call(messages.GetCounters)

    def close(self) -> None:
        """Ends the process and its workers; removes every file of theirs. Idempotent."""
        self._connection.close()
        self._drop_interrupted()
        self._keep(None)

    def _offer(self, offered: Offer, in_flight: InFlight, clock: Clock) -> PublishReport:
        try:
            self._transact(offered, in_flight, clock)
        except (EngineDead, EngineTimeout):
            self._interrupted = offered
            raise
        except BaseException:
            shared_memory.remove_buckets(offered.buckets)
            raise
        self._keep(offered)
        return PublishReport(
            version=offered.version,
            manifest_digest=offered.manifest.digest,
            num_bytes=sum(bucket.num_bytes for bucket in offered.buckets),
            seconds=clock.seconds,
        )

    def _transact(self, offered: Offer, in_flight: InFlight, clock: Clock) -> None:
        call = self._connection.call
        if call(messages.Begin, bool, version=offered.version, manifest=offered.manifest):
            return
        for bucket in offered.buckets:
            call(messages.Stage, bucket=bucket)
        clock.lap("stage")
        call(messages.Prepare)
        clock.lap("prepare")
        call(messages.Commit, in_flight=in_flight)
        clock.lap("commit")

    def _keep(self, committed: Offer | None) -> None:
        if self._committed is not None:
            shared_memory.remove_buckets(self._committed.buckets)
        self._committed = committed

    def _drop_interrupted(self) -> None:
        if self._interrupted is not None:
            shared_memory.remove_buckets(self._interrupted.buckets)
        self._interrupted = None


class Clock:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
