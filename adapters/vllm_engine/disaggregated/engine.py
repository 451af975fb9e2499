"""DisaggregatedEngine: prompts are computed by some vLLM processes and continued by others, behind the engine contract.

Keys and values of a prompt travel from a prefill worker to a decode worker over NIXL, all planes of them. Everything
else is as in `LocalEngine`: each worker is such a process, with the same supervision and the same transaction on its
weights; what is new is that a version counts only when all of them have committed it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from adapters.clock import Clock
from adapters.contract import (
    EngineDead,
    EngineTimeout,
    GenerationRequest,
    GenerationResult,
    Health,
    ScoreRequest,
    ScoreResult,
    Version,
    distinct_ids,
)
from adapters.vllm_engine.client.launch import PROCESS
from adapters.vllm_engine.client.offers import InFlight, Offer, PublishingEngine
from adapters.vllm_engine.disaggregated import transports
from adapters.vllm_engine.disaggregated.fleet import Fleet, Worker, check_alike
from adapters.vllm_engine.disaggregated.joint import JointTransaction
from adapters.vllm_engine.disaggregated.router import Router
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.memory.staging import store_for
from adapters.vllm_engine.process import messages
from adapters.vllm_engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class DisaggregatedEngine(PublishingEngine):
    """A running engine. Use as a context manager, or call `close`. Not for use from several threads."""

    def __init__(
        self,
        *,
        prefill: Sequence[EngineSettings],
        decode: Sequence[EngineSettings],
        transports_wanted: str = transports.AUTO,
        module: str = PROCESS,
    ) -> None:
        """Finds a transport that works, starts all processes and waits until they serve.

        Args:
            prefill, decode: one for each worker; they agree in everything that shapes the KV cache.
            transports_wanted: what UCX may use, its UCX_TLS; "auto" takes the first that works.
            module: what runs in the processes. Tests pass one that breaks something first.

        Raises:
            ValueError: no worker of a role, or workers that differ in what they must share.
            EngineStartFailed, EngineTimeout: no transport works, or a process did not come up.
        """
        check_alike(prefill, decode)
        super().__init__(store_for(prefill[0].staging))
        if removed := leftovers.remove_abandoned():
            logger.info("removed what killed processes left behind: %s", sorted(str(path) for path in removed))
        self.transports = transports.choose(transports_wanted, start_seconds=prefill[0].start_seconds)
        self._fleet = Fleet(prefill, decode, transports=self.transports, module=module)
        self._router = Router(self._fleet)
        self._joint = JointTransaction(self._fleet, self._router)
        self._unread: set[str] = set()

    @property
    def workers(self) -> list[Worker]:
        """Prefill workers, then decode workers."""
        return self._fleet.workers

    @property
    def pids(self) -> list[int]:
        return [worker.connection.pid for worker in self.workers]

    @property
    def pid(self) -> int:
        """Of the first decode worker."""
        return self._fleet.decode[0].connection.pid

    @property
    def trace_kind(self) -> str:
        ready = self.workers[0].connection.ready
        assert ready is not None
        return ready.trace_kind

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See `contract.Engine.generate`. Sent when iteration starts; what is not consumed is aborted.

        `GenerationResult.kv_bytes` says how much of its prompt's keys and values travelled for a request.
        """
        pending = distinct_ids("generate", requests)
        self._forget_unread()
        self._joint.resolve()
        router = self._router
        results, self._unread = router.results, pending
        router.submit(requests)
        try:
            while pending:
                while not results:
                    router.pump()
                while results:
                    result = results.popleft()
                    pending.discard(result.request_id)
                    yield result
        except GeneratorExit:
            self._forget_unread()
            raise

    def _forget_unread(self) -> None:
        """Ends requests of an earlier call that nobody reads any more, and drops what they became."""
        self._router.abort_all()
        self._router.results.clear()
        self._unread = set()

    def abort(self, request_ids: Iterable[str]) -> None:
        self._router.abort(request_ids)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """See `contract.Engine.score`. The decode workers share the requests; no keys and values travel."""
        distinct_ids("score", requests)
        self._joint.resolve()
        done: dict[str, ScoreResult] = {}
        while left := [r for r in requests if r.request_id not in done]:
            done |= {result.request_id: result for result in self._score_once(left)}
        return [done[r.request_id] for r in requests]

    def _score_once(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Scores of the workers that did not fail; those of the others are missing."""
        workers = self._fleet.usable(self._fleet.decode)[: len(requests)]
        parts = [{"requests": tuple(requests[i :: len(workers)])} for i in range(len(workers))]
        results: list[ScoreResult] = []
        for worker, value in self._fleet.everywhere(workers, messages.Score, list[ScoreResult], each=parts):
            if isinstance(value, EngineDead | EngineTimeout):
                self._fleet.give_up(worker, value)
            elif isinstance(value, Exception):
                raise value
            else:
                results += value
        return results

    def restart(self) -> None:
        """Brings every worker to the version committed last: those that serve it go on, all others start anew.

        Requests that were running are lost.
        """
        self._unread = set()
        wanted = self._committed.version if self._committed is not None else Version(0, 0)
        bad = [worker for worker in self.workers if not self._fleet.serves(worker, wanted)]
        self._router.forget()
        self._fleet.replace(bad)
        self._joint.forget()
        if self._committed is not None:
            self._joint.run(self._committed, "drain", Clock())
        logger.warning("restarted %d of %d workers", len(bad), len(self.workers))

    def health(self) -> Health:
        """The state of the whole, and of each worker. It serves while a worker of each role does.

        Raises:
            EngineDead, EngineTimeout: no worker of a role is left.
        """
        self._joint.resolve(quietly=True)
        workers = self._fleet.health()
        for role in (self._fleet.prefill, self._fleet.decode):
            self._fleet.usable(role)  # raises if there is none
        served = [worker.version for worker in workers if worker.version is not None]
        states = {worker.state for worker in workers}
        unwell = [f"{w.role} worker {w.pid} is {w.state}" for w in workers if w.state not in ("serving", "publishing")]
        reasons = [*([self._joint.doubt] if self._joint.doubt else []), *unwell]
        blocked = self._joint.doubt is not None or "blocked" in states
        return Health(
            state="blocked" if blocked else "publishing" if "publishing" in states else "serving",
            version=min(served),
            num_running=self._router.num_running,
            pid=self.pid,
            reason="; ".join(reasons) or None,
            workers=workers,
        )

    def counters(self) -> dict[str, int]:
        """Since their start: layer executions and tokens in them, of the decode workers; records held by all."""
        counted = {worker: worker.connection.call(messages.GetCounters) for worker in self.workers if worker.usable}
        decode = [counted[worker] for worker in self._fleet.usable(self._fleet.decode)]
        totals = {name: sum(of[name] for of in decode) for name in decode[0]}
        return {**totals, "records": sum(of["records"] for of in counted.values())}

    def close(self) -> None:
        """Ends every process; removes every file of theirs. Idempotent."""
        self._fleet.close()
        self._forget_offers()

    def _transact(self, offered: Offer, in_flight: InFlight, clock: Clock) -> None:
        self._joint.run(offered, in_flight, clock)
