"""Where the driver gets its rollouts: made now, made ahead while the trainer works, or kept in the checkpoint.

With overlap_rollouts the next update's samples are drawn while this update trains, by the weights that the engine has
then: one update older than on-policy ones would be. They are part of the checkpoint, because those weights are gone
afterwards; so a resumed run learns from the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from adapters.contract import Engine, Version
from tether import gather, rollout
from tether.gather import Rollouts
from tether.learn import Batch
from tether.prepare import Job
from tether.ranks import from_rank_zero, rank
from tether.reward_process import Judge
from tether.saving import State


class RolloutSource:
    """Every rank holds one; what talks to the engine happens on rank 0, and its errors are everybody's.

    Args:
        engine: None on every rank but 0.
        judge: runs the reward function; asked on rank 0.
    """

    def __init__(self, job: Job, *, engine: Engine | None, judge: Judge) -> None:
        self.job, self.engine, self.judge, self.order = job, engine, judge, job.order()
        self._background = ThreadPoolExecutor(1)
        self._ahead: Future[Rollouts] | None = None
        self._now: Rollouts | None = None

    def __enter__(self) -> RolloutSource:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for rollouts that are being made: nobody else may talk to the engine before they are done."""
        self._background.shutdown()

    def take(self, state: State) -> tuple[Batch, int, dict[str, Any]]:
        """What the update after `state` learns from, the prompts used with it, and figures. All ranks together."""
        return from_rank_zero(lambda: self._take(state))

    def make_ahead(self, update: int, *, version: Version, position: int) -> None:
        """Begins the rollouts of an update, if the run overlaps them. The engine is busy until `finish_ahead`."""
        if self.job.settings.overlap_rollouts and rank() == 0:
            self._ahead = self._background.submit(self._make, update, version, position)

    def finish_ahead(self) -> str | None:
        """Waits for them. All ranks together.

        Returns:
            On rank 0 what the checkpoint keeps of them; None without them, and on every other rank.
        """
        ahead, self._ahead = self._ahead, None
        return from_rank_zero(lambda: None if ahead is None else gather.to_text(ahead.result(), self.job))

    def keep(self, update: int, advantages: Sequence[float]) -> None:
        """Writes every sample of the update to OUT/rollouts, when that is wanted. All ranks together."""

        def write() -> None:
            if self.job.settings.keep_rollouts:
                assert self._now is not None
                lines = rollout.to_json(self.job, self._now.samples, self._now.rewards, advantages)
                self.job.directory.write_rollouts(update, lines)

        from_rank_zero(write)

    def _make(self, update: int, version: Version, position: int) -> Rollouts:
        assert self.engine is not None
        return gather.gather(
            self.engine, self.job, self.judge, self.order, update=update, version=version, position=position
        )

    def _take(self, state: State) -> tuple[Batch, int, dict[str, Any]]:
        update = state.update + 1
        if state.pending is None:
            made = self._make(update, state.version, state.position)
        else:
            made = gather.from_text(state.pending, self.job)
        self._now = gather.without_stale(made, update=update, max_staleness=self.job.settings.max_staleness)
        figures = rollout.metrics(self.job, update, self._now.samples, self._now.rewards)
        return self._now.batch(), self._now.position, figures | self._now.counts
