"""Where a run stands, and how that is saved and restored with the trainer's own state.

Beside parameters, optimizer, scheduler and generators a checkpoint carries the `State`. A start or a resume opens a new
incarnation: versions of a run that was killed can never be mistaken for those of the one that goes on from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapters.contract import Version
from tether.prepare import Job
from tether.progress import say
from tether.ranks import from_rank_zero
from tether.tripwires import Watch

if TYPE_CHECKING:
    from adapters.megatron.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class State:
    """How far a run is."""

    update: int = 0
    """Updates done."""
    position: int = 0
    """Prompts used since the very start; with the run's seed it gives those that come next."""
    incarnation: int = 1
    """Starts and resumes so far."""
    metrics: dict[str, Any] | None = None
    """The line of the last update, in case the run is killed between its checkpoint and that line."""
    watch: Watch = dataclasses.field(default_factory=Watch)
    """What the tripwires remember."""
    pending: str | None = None
    """Rollouts that were made ahead for the next update, as `gather.to_text` writes them; known to rank 0."""

    @property
    def version(self) -> Version:
        """The name of the weights that the trainer holds."""
        return Version(incarnation=self.incarnation, update=self.update)


def save(job: Job, trainer: Trainer, state: State) -> None:
    """Writes checkpoints/iter_NNNNNNN, complete or not at all, on all ranks together."""
    from adapters.megatron import checkpoint

    directory = job.directory.checkpoints
    extra = {**dataclasses.asdict(state), "contract": job.contract}
    checkpoint.save(directory, trainer, extra, update=state.update, keep=job.settings.keep_checkpoints)


def restore(job: Job, trainer: Trainer) -> State:
    """The state to go on from: that of the newest checkpoint on --resume, else of a new run.

    The trainer holds the matching weights afterwards, and OUT holds nothing past them.
    """
    state = _load(job, trainer) if job.arguments.resume else None
    if state is None:
        trainer.load_hf(job.source)
        state = State()
    from_rank_zero(lambda: _settle(job, state))
    return state


def _load(job: Job, trainer: Trainer) -> State | None:
    """None if the run was killed before its first checkpoint was complete."""
    from adapters.megatron import checkpoint

    if job.directory.newest_checkpoint() is None:
        say("resume: no complete checkpoint yet, starting from the model")
        return None
    extra = checkpoint.load(job.directory.checkpoints, trainer)
    state = State(
        **{name: extra[name] for name in ("update", "position", "metrics", "pending")},
        incarnation=extra["incarnation"] + 1,
        watch=Watch(**extra["watch"]),
    )
    return state


def _settle(job: Job, state: State) -> None:
    job.directory.cut_back(state.update, state.metrics)
    job.directory.append_event("resume" if job.arguments.resume else "start", **{
        "update": state.update, "incarnation": state.incarnation, "updates": job.arguments.updates,
    })  # fmt: skip
