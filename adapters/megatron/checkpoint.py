"""Checkpoints of a Trainer in Megatron's torch_dist format: complete or not there, bit-exact on the same layout.

    DIRECTORY/iter_0000004/   parameters, optimizer, scheduler, generators (Megatron's files) and tether.json
    DIRECTORY/latest          the name of the newest complete one

A parameter's key is its Hugging Face name and has one global shape, so a reshardable checkpoint written under one
layout loads under another. Every function is collective unless it says otherwise.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling

from adapters.megatron import checkpoint_files as files
from adapters.megatron import checkpoint_gather, generators
from adapters.megatron import checkpoint_state as contents
from adapters.megatron.checkpoint_files import Retention
from adapters.megatron.checkpoint_writer import Writing
from adapters.megatron.runtime import device, raise_together
from adapters.megatron.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is durable."""

    path: Path
    update: int
    format: str
    """reshardable or same_layout."""
    stall_seconds: float
    """How long training stood still for it, on this rank."""
    duration_seconds: float
    """From its beginning until it was durable."""


def save(
    directory: Path,
    trainer: Trainer,
    extra: dict[str, Any],
    *,
    update: int | None = None,
    retention: Retention | None = None,
    format: str = "reshardable",
) -> Path:
    """Writes a checkpoint and waits until it is durable: `begin` and `PendingSave.complete`. Returns its directory."""
    return begin(directory, trainer, extra, update=update, retention=retention, format=format).complete().path


def begin(
    directory: Path,
    trainer: Trainer,
    extra: dict[str, Any],
    *,
    update: int | None = None,
    retention: Retention | None = None,
    format: str = "reshardable",
) -> PendingSave:
    """Starts to write iter_NNNNNNN under a staging name, from a copy of the trainer's state: training may go on.

    It is a checkpoint once `PendingSave.complete` has returned: synced to disk, renamed, and named by `latest`. A kill
    at any moment before leaves the checkpoint that `latest` named before, whole.

    Args:
        directory: made if missing; one run writes to it.
        trainer: what to save.
        extra: JSON of the caller (data position, weight version, run contract), given back by `load`.
        update: the number in the name; the trainer's own count if left out.
        retention: which older ones stay once this one is complete; all, if left out.
        format: reshardable or same_layout, see `checkpoint_state.FORMATS`.

    Raises:
        TypeError: extra is not JSON.
        RuntimeError, OSError: writing could not begin on some rank; raised on all.
    """
    begun = time.perf_counter()
    update = trainer.num_updates if update is None else update
    description = {**contents.describe(trainer, format), "update": update, "extra": json.loads(json.dumps(extra))}
    trainer.gather_parameters()
    staging = _from_rank_zero(lambda: _prepared(directory, update))
    try:
        writing = _together(lambda: _start(staging, trainer, format))
    except Exception:
        _on_rank_zero(lambda: files.discard(staging))
        raise
    return PendingSave(
        staging, files.final_name(directory, update), description, writing, retention or Retention(), begun=begun
    )


class PendingSave:
    """A checkpoint on its way to disk."""

    def __init__(
        self,
        staging: Path,
        final: Path,
        description: dict[str, Any],
        writing: Writing,
        retention: Retention,
        *,
        begun: float,
    ) -> None:
        self._staging, self._final, self._description = staging, final, description
        self._writing, self._retention, self._begun = writing, retention, begun
        self.stall_seconds = time.perf_counter() - begun

    @property
    def update(self) -> int:
        return self._description["update"]

    def is_written(self) -> bool:
        """Whether every rank's files are on disk (or failed to be), so that `complete` will not wait."""
        done = torch.tensor([self._writing.is_done], dtype=torch.int32, device=device())
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        return bool(done.item())

    def complete(self) -> Saved:
        """Waits for all ranks' files and makes them the newest checkpoint.

        Raises:
            RuntimeError, OSError: writing failed on some rank; raised on all. What was staged is removed, older
                checkpoints are as they were.
        """
        begun = time.perf_counter()
        try:
            own = _together(self._finished)
            facts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(facts, own)
            every = {name: fact for part in facts for name, fact in part.items()}
            _on_rank_zero(
                lambda: files.commit(self._staging, self._final, self._description, every, retention=self._retention)
            )
        except Exception as error:
            _on_rank_zero(lambda: files.discard(self._staging))
            error.add_note(f"{self._final.name} was not saved; older checkpoints in {self._final.parent} are whole")
            raise
        now = time.perf_counter()
        self.stall_seconds += now - begun
        return Saved(
            path=self._final,
            update=self.update,
            format=self._description["sharding"],
            stall_seconds=self.stall_seconds,
            duration_seconds=now - self._begun,
        )

    def _finished(self) -> dict[str, tuple[int, str]]:
        """Ends this rank's writing, then all ranks' together; the facts of the files that this rank answers for."""
        _together(self._writing.join)
        self._writing.finish()
        rank = dist.get_rank()
        known = self._writing.facts
        names = [name for name in files.names_in(self._staging) if _writer_of(name) == rank and name not in known]
        return {**known, **files.facts(self._staging, names)}


def load(
    directory: Path, trainer: Trainer, *, path: Path | None = None, has_new_schedule: bool = False
) -> dict[str, Any]:
    """Restores the trainer from the newest checkpoint, or from a given one of the directory.

    On the layout that wrote it everything is bit-exact. Under another one parameters, masters, moments and the schedule
    are; the generators' states have no counterpart there and stay as the start seeded them, which a log line says.

    Args:
        path: the checkpoint; the one that `latest` names, if left out.
        has_new_schedule: keep the learning rate, its schedule, Adam's constants and weight decay that this trainer was
            made with; left out, they must be the saved ones.

    Returns:
        The extra that was saved.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or of another model (names every tensor that differs), dtype or optimizer, or can
            only be loaded by the layout that wrote it.
    """
    chosen = _from_rank_zero(lambda: path or latest(directory))
    if chosen is None:
        raise FileNotFoundError(f"{directory}: no complete checkpoint (iter_NNNNNNN)")
    _on_rank_zero(lambda: files.require_whole(chosen, deep=True))
    description = _from_rank_zero(lambda: files.read_description(chosen))
    contents.check_loadable(chosen, description, trainer)
    trainer.gather_parameters()
    _together(lambda: _read(chosen, trainer, description, has_new_schedule))
    return description["extra"]


def latest(directory: Path) -> Path | None:
    """The checkpoint to go on from, see `checkpoint_files.latest`. Not collective."""
    return files.latest(directory)


def _prepared(directory: Path, update: int) -> Path:
    staging = files.staging_name(directory, update)
    files.prepare(staging)
    return staging


def _start(staging: Path, trainer: Trainer, format: str) -> Writing:
    checkpoint_gather.gather_without_copies()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return Writing(
        contents.state(trainer, format, is_loading=False, with_generators=True),
        staging,
        group=group,
        metadata=contents.metadata(format),
        live_storages=contents.live_storages(trainer),
    )


def _writer_of(name: str) -> int:
    """Rank that wrote a file: Megatron names tensor files __RANK_INDEX.distcp, everything else is rank 0's."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(match[1]) if match else 0


def _read(path: Path, trainer: Trainer, description: dict[str, Any], has_new_schedule: bool) -> None:
    same = description["layout"] == contents.layout()
    if not same and dist.get_rank() == 0:
        logger.warning("%s was written at %s: generators keep their states", path, description["layout"])
    if not has_new_schedule:  # before the load, which writes into the trainer's own memory
        contents.check_schedule(path, dist_checkpointing.load_common_state_dict(str(path))["scheduler"], trainer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = dist_checkpointing.load(
        contents.state(trainer, description["sharding"], is_loading=True, with_generators=same),
        str(path),
        sharded_strategy=FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), group),
        strict=StrictHandling.RAISE_ALL if same else StrictHandling.RAISE_UNEXPECTED,
    )
    own = contents.constants(trainer)
    trainer.model.load_state_dict(state["model"])
    with torch.no_grad():
        trainer.optimizer.load_state_dict(state["optimizer"])
    if has_new_schedule:
        for group, constants in zip(trainer.optimizer.param_groups, own, strict=True):
            group.update(constants)
    trainer.scheduler.override_opt_param_scheduler = True  # with its own values, which are the saved ones or asked for
    trainer.scheduler.num_steps = 0  # its load_state_dict adds to the count
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.num_updates = state["num_updates"]
    if same:
        generators.restore(state["generators"])


def _on_rank_zero(action: Callable[[], None]) -> None:
    _together(action if dist.get_rank() == 0 else lambda: None)


def _from_rank_zero(action: Callable[[], Any]) -> Any:
    """Rank 0's result on every rank; its error too."""
    box: list[Any] = [None]

    def ask() -> None:
        box[0] = action()

    _on_rank_zero(ask)
    dist.broadcast_object_list(box)
    return box[0]


def _together(action: Callable[[], Any]) -> Any:
    """Runs it on every rank and returns its result; an error anywhere is an error everywhere."""
    error: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    raise_together(error)
    return result
