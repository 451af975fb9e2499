"""LocalEngine: vLLM in a process of its own on this machine, behind the engine contract.

The process is started here, supervised, spoken to over a Unix socket (`connection`), and ends when this process does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from adapters.clock import Clock
from adapters.contract import (
    GenerationRequest,
    GenerationResult,
    Health,
    ScoreRequest,
    ScoreResult,
    distinct_ids,
)
from adapters.vllm_engine.client.connection import Connection
from adapters.vllm_engine.client.launch import PROCESS
from adapters.vllm_engine.client.offers import InFlight, Offer, PublishingEngine
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.memory.staging import store_for
from adapters.vllm_engine.process import messages
from adapters.vllm_engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class LocalEngine(PublishingEngine):
    """A running engine. Use as a context manager, or call `close`. Not for use from several threads."""

    def __init__(self, settings: EngineSettings, *, module: str = PROCESS) -> None:
        """Starts the process and waits until it serves.

        Args:
            module: what runs in it. Tests pass one that breaks something first.

        Raises:
            EngineStartFailed: the process ended while starting; the message shows its log.
            EngineTimeout: it did not come up within `settings.start_seconds`.
        """
        super().__init__(store_for(settings.staging))
        self.settings, self._module = settings, module
        self._unread: set[str] = set()
        if removed := leftovers.remove_abandoned():
            logger.info("removed what killed processes left behind: %s", sorted(str(path) for path in removed))
        self._connection = Connection(settings, module)

    @property
    def pid(self) -> int:
        return self._connection.pid

    @property
    def trace_kind(self) -> str:
        assert self._connection.ready is not None
        return self._connection.ready.trace_kind

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See `contract.Engine.generate`. Sent when iteration starts; what is not consumed is aborted."""
        pending = distinct_ids("generate", requests)
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
        distinct_ids("score", requests)
        return self._connection.call(messages.Score, list[ScoreResult], requests=tuple(requests))

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

    def health(self) -> Health:
        return self._connection.call(messages.GetHealth, Health)

    def counters(self) -> dict[str, int]:
        """Layer executions, tokens in them and records held, of the first worker since its start."""
        return self._connection.call(messages.GetCounters)

    def close(self) -> None:
        """Ends the process and its workers; removes every file of theirs. Idempotent."""
        self._connection.close()
        self._forget_offers()

    def _transact(self, offered: Offer, in_flight: InFlight, clock: Clock) -> None:
        call = self._connection.call
        if call(messages.Begin, bool, version=offered.version, manifest=offered.manifest):
            return
        self._connection.call_all([(messages.Stage, {"bucket": bucket}) for bucket in offered.buckets])
        clock.lap("stage")
        call(messages.Prepare)
        clock.lap("prepare")
        within = call(messages.Commit, dict[str, float], in_flight=in_flight)
        clock.lap("settle")
        clock.seconds["settle"] -= sum(within.values())
        clock.seconds.update(within)
