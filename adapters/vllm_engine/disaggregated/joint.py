"""One publication over several engine processes: a version counts only when all of them have committed it.

    begin, stage, prepare on each -> all prepared -> drain or abort what runs -> commit on each, held
        -> all committed: settle each            (the version counts)
        -> one did not:   revert those that did  (the old version counts)

Until `settle` a worker that committed serves nothing and can go back. A worker that is lost or silent in between is in
doubt: nothing is generated until it says what it serves, or is started anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.clock import Clock
from adapters.contract import (
    EngineBlocked,
    EngineDead,
    EngineError,
    EngineTimeout,
    Health,
    PublicationFailed,
    PublicationRefused,
)
from adapters.vllm_engine.client.offers import InFlight, Offer
from adapters.vllm_engine.disaggregated.fleet import Fleet, Worker
from adapters.vllm_engine.disaggregated.router import Router
from adapters.vllm_engine.process import messages

SEVERITY = (EngineDead, EngineTimeout, EngineBlocked, PublicationFailed, PublicationRefused, EngineError)
"""Of the errors of several workers the first of these is raised: what is to be done about it covers the rest."""


class JointTransaction:
    """Publishes to every worker of a router.

    Attributes:
        doubt: why it is not known that all workers serve one version; None when it is.
    """

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._fleet, self._router = fleet, router
        self.doubt: str | None = None
        self._way_out: type[messages.Call] = messages.Revert

    def run(self, offered: Offer, in_flight: InFlight, clock: Clock) -> None:
        """Makes every worker serve the offer. Raises what `contract.Engine.publish` does.

        Raises:
            EngineDead, EngineTimeout: also if a worker was lost before: a version that it lacks would not count.
        """
        self._fleet.check_whole()
        workers = self._prepare(offered, clock)
        if not workers:
            self._agree(offered)
            return
        self._router.finish(in_flight)
        clock.lap("drain")
        self._commit(workers, offered)
        clock.lap("commit")

    def _prepare(self, offered: Offer, clock: Clock) -> list[Worker]:
        """-> the workers that do not serve the offer already, all of them prepared."""
        everyone = self._fleet.workers
        try:
            begun = self._all(everyone, messages.Begin, bool, version=offered.version, manifest=offered.manifest)
            workers = [worker for worker, served in zip(everyone, begun, strict=True) if not served]
            for bucket in offered.buckets:
                self._all(workers, messages.Stage, bucket=bucket)
            clock.lap("stage")
            self._all(workers, messages.Prepare)
            clock.lap("prepare")
        except EngineError:
            for worker in everyone:
                if worker.usable:
                    self._fleet.post(worker, messages.AbortPublication)
            raise
        return workers

    def _commit(self, workers: Sequence[Worker], offered: Offer) -> None:
        self._begin_doubt(f"the commit of version {offered.version} is not decided", messages.Revert)
        answers = self._fleet.everywhere(workers, messages.Commit, in_flight="drain", hold=True)
        errors = [value for _, value in answers if isinstance(value, Exception)]
        if errors:
            committed = [worker for worker, value in answers if not isinstance(value, Exception)]
            reverted = self._fleet.everywhere(committed, messages.Revert)
            errors += [value for _, value in reverted if isinstance(value, Exception)]
            if not any(isinstance(error, EngineTimeout) for error in errors):
                self.resolve(quietly=True)
            raise worst(errors)
        self._begin_doubt(f"version {offered.version} is committed, and not every worker has said so", messages.Settle)
        settled = self._fleet.everywhere(workers, messages.Settle)
        if errors := [value for _, value in settled if isinstance(value, Exception)]:
            raise worst(errors)
        self._agree(offered)

    def resolve(self, *, quietly: bool = False) -> None:
        """Ends a doubt, if every worker that is left can be brought to one version.

        Raises:
            EngineBlocked: it cannot, and not `quietly`.
        """
        if self.doubt is None:
            return
        workers = [worker for worker in self._fleet.workers if worker.usable]
        answers = self._fleet.everywhere(workers, self._way_out)
        answers += self._fleet.everywhere([w for w in workers if w.usable], messages.GetHealth, Health)
        health = [value for _, value in answers if isinstance(value, Health)]
        versions = {h.version for h in health}
        if len(health) == len(workers) and len(versions) == 1 and all(h.state == "serving" for h in health):
            self.doubt, (self._router.version,) = None, versions
        elif not quietly:
            raise EngineBlocked(f"{self.doubt}; publish that version again, or restart the engine")

    def forget(self) -> None:
        """Every worker has been brought to one version by other means."""
        self.doubt = None

    def _begin_doubt(self, why: str, way_out: type[messages.Call]) -> None:
        self.doubt, self._way_out = why, way_out

    def _agree(self, offered: Offer) -> None:
        self.doubt, self._router.version = None, offered.version

    def _all(self, workers: Sequence[Worker], call: type[messages.Call], kind: Any = None, **fields: Any) -> list[Any]:
        """The answers of all workers. Raises the worst error when all have answered."""
        answers = self._fleet.everywhere(workers, call, kind, **fields)
        if errors := [value for _, value in answers if isinstance(value, Exception)]:
            raise worst(errors)
        return [value for _, value in answers]


def worst(errors: Sequence[Exception]) -> Exception:
    """What tells the caller most about what to do."""
    return min(errors, key=lambda error: next((i for i, k in enumerate(SEVERITY) if isinstance(error, k)), -1))
