"""Where a run stands, and how that is saved and restored with the trainer's own state.

Beside parameters, optimizer, scheduler and generators a checkpoint carries the `State`. A start or a resume opens a new
incarnation: versions of a run that was killed can never be mistaken for those of the one that goes on from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapters.contract import Version
from adapters.megatron import checkpoint_files
from tether.prepare import Job
from tether.ranks import from_rank_zero
from tether.tripwires import Watch

if TYPE_CHECKING:
    from adapters.megatron.checkpoint import PendingSave
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


class Saver:
    """Writes a run's checkpoints, one at a time. All ranks make the same calls together.

    An event `saved` appears in OUT/events.jsonl once a checkpoint is durable, and not before.
    """

    def __init__(self, job: Job, trainer: Trainer, *, resumed: State | None) -> None:
        self._job, self._trainer = job, trainer
        self._pending: PendingSave | None = None
        self._last: tuple[int, str] | None = None
        """Update and format of the newest checkpoint."""
        if resumed is not None:
            path = checkpoint_files.final_name(job.directory.checkpoints, resumed.update)
            format = from_rank_zero(lambda: checkpoint_files.read_description(path)["sharding"])
            self._last = resumed.update, format

    def save(self, state: State, *, is_final: bool = False) -> None:
        """Saves a state that is not saved yet, if the run saves at all. Returns before it is durable if saves are
        asynchronous.

        A final one, after which a run may go on elsewhere, is reshardable and waited for.
        """
        from adapters.megatron import checkpoint

        self.finish()
        settings = self._job.settings
        if not settings.save_every or (state.update == 0 and not settings.save_start):
            return
        format = "reshardable" if is_final else settings.save_format
        if self._last in ((state.update, format), (state.update, "reshardable")):
            return
        self._pending = checkpoint.begin(
            self._job.directory.checkpoints,
            self._trainer,
            {**dataclasses.asdict(state), "contract": self._job.contract},
            update=state.update,
            retention=checkpoint.Retention(keep_last=settings.keep_last, keep_every=settings.keep_every),
            format=format,
        )
        if is_final or not settings.async_save:
            self.finish()

    def poll(self) -> None:
        """Completes a save whose files are written on every rank."""
        if self._pending is not None and self._pending.is_written():
            self.finish()

    def finish(self) -> None:
        """Waits until the save that is under way is durable."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        saved = pending.complete()
        self._last = saved.update, saved.format
        figures = {
            "update": saved.update,
            "format": saved.format,
            "stall_seconds": round(saved.stall_seconds, 4),
            "duration_seconds": round(saved.duration_seconds, 4),
        }
        from_rank_zero(lambda: self._job.directory.append_event("saved", **figures))


def is_due(job: Job, update: int) -> bool:
    """Whether a checkpoint follows this update."""
    every = job.settings.save_every
    return bool(every) and (update % every == 0 or update == job.arguments.updates)


def restore(job: Job, trainer: Trainer) -> State:
    """The state to go on from: that of a checkpoint on --resume, else of a new run.

    The trainer holds the matching weights afterwards, and OUT holds nothing past them.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint to resume, or not one for this trainer.
    """
    if job.arguments.resume:
        state = _load(job, trainer)
    else:
        trainer.load_hf(job.source)
        state = State()
    from_rank_zero(lambda: _settle(job, state))
    return state


def _load(job: Job, trainer: Trainer) -> State:
    from adapters.megatron import checkpoint

    path = from_rank_zero(lambda: job.directory.checkpoint_to_resume(job.arguments.resume_from))
    has_new_schedule = bool(job.arguments.allow_change)
    extra = checkpoint.load(job.directory.checkpoints, trainer, path=path, has_new_schedule=has_new_schedule)
    return State(
        **{name: extra[name] for name in ("update", "position", "metrics", "pending")},
        incarnation=extra["incarnation"] + 1,
        watch=Watch(**extra["watch"]),
    )


def _settle(job: Job, state: State) -> None:
    if job.arguments.resume_from is not None:
        checkpoint_files.go_back_to(checkpoint_files.final_name(job.directory.checkpoints, state.update))
    job.directory.cut_back(state.update, state.metrics)
    details: dict[str, Any] = {
        "update": state.update,
        "incarnation": state.incarnation,
        "updates": job.arguments.updates,
    }
    if job.changes:
        details["changed"] = job.changes
    job.directory.append_event("resume" if job.arguments.resume else "start", **details)
