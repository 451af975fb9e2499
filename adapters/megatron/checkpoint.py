"""Checkpoints of a Trainer in Megatron's torch_dist format: complete or not there, bit-exact on the same layout.

    DIRECTORY/iter_0000004/   parameters, optimizer, scheduler, generators (Megatron's files) and tether.json
    DIRECTORY/latest          the name of the newest complete one

A parameter's key is its Hugging Face name and has one global shape, so a checkpoint written under one tensor- and
data-parallel layout loads under another. Every function is collective unless it says otherwise.
"""

from __future__ import annotations

import inspect
import json
import logging
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from adapters.megatron import checkpoint_files as files
from adapters.megatron.runtime import raise_together
from adapters.megatron.trainer import Trainer

logger = logging.getLogger(__name__)

# Only this sharding of the optimizer's state can be loaded under another layout; it gathers the state at each save.
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save(directory: Path, trainer: Trainer, extra: dict[str, Any], *, update: int | None = None, keep: int = 0) -> Path:
    """Writes iter_NNNNNNN under a staging name, syncs it to disk, renames it, and then moves the `latest` pointer.

    A kill at any moment leaves the checkpoint that `latest` named before, whole.

    Args:
        directory: made if missing; one run writes to it.
        trainer: what to save.
        extra: JSON of the caller (data position, weight version, run contract), given back by `load`.
        update: the number in the name; the trainer's own count if left out.
        keep: newest checkpoints to keep, 0 for all; older ones go after the new one is complete.

    Returns:
        The checkpoint's directory.

    Raises:
        TypeError: extra is not JSON.
        RuntimeError, OSError: writing failed on some rank; raised on all.
    """
    update = trainer.num_updates if update is None else update
    text = json.dumps(extra)
    staging, final = files.staging_name(directory, update), files.final_name(directory, update)
    _on_rank_zero(lambda: files.prepare(staging))
    _together(lambda: _write(staging, trainer))
    description = {**_describe(trainer), "update": update, "extra": json.loads(text)}
    _on_rank_zero(lambda: files.commit(staging, final, description, keep=keep))
    return final


def load(directory: Path, trainer: Trainer) -> dict[str, Any]:
    """Restores the trainer from the newest complete checkpoint.

    On the layout that wrote it everything is bit-exact. Under another tensor-parallel size the generators' states have
    no counterpart and are left as they are, which a log line says.

    Returns:
        The extra that was saved.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: it is of another model: names every tensor that differs, or the dtype.
    """
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        chosen = [latest(directory)]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        raise FileNotFoundError(f"{directory}: no complete checkpoint (iter_NNNNNNN)")
    path: Path = chosen[0]
    description = files.read_description(path)
    _check_same_model(path, description, _describe(trainer))
    _together(lambda: _read(path, trainer, description["layout"]))
    return description["extra"]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None. Not collective.

    It is the one that the pointer names; if that is gone or damaged, the newest complete one, with a warning.
    Incomplete directories are never chosen and named in a warning.
    """
    return files.latest(directory)


def _write(path: Path, trainer: Trainer) -> None:
    _keep_results_in_process()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(
        _state(trainer, is_loading=False, with_generators=True),
        str(path),
        sharded_strategy=FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group),
        content_metadata=dict(SHARDING),
        # From 0.17 on the default asks for another package.
        **_supported(dist_checkpointing.save, async_strategy="mcore"),
    )


def _keep_results_in_process() -> None:
    """Patch: a save that is not asynchronous gets its results from a queue of this process.

    Megatron-Core (0.16 to 0.19) makes a multiprocessing Manager for them: a process that takes seconds to start, holds
    our standard output and outlives a trainer that is killed. The queue is read where it is filled.
    """
    if not hasattr(filesystem_async, "_results_queue"):
        raise ImportError("this Megatron-Core keeps the results of a save elsewhere; see _keep_results_in_process")
    if not isinstance(filesystem_async._results_queue, queue.Queue):
        filesystem_async._results_queue = queue.Queue()


def _read(path: Path, trainer: Trainer, layout: dict[str, int]) -> None:
    same = layout["tensor_parallel"] == parallel_state.get_tensor_model_parallel_world_size()
    if not same and dist.get_rank() == 0:
        logger.warning(
            "%s was written at tensor_parallel %d: generators keep their states", path, layout["tensor_parallel"]
        )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = dist_checkpointing.load(
        _state(trainer, is_loading=True, with_generators=same),
        str(path),
        sharded_strategy=FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), group),
        strict=StrictHandling.RAISE_ALL if same else StrictHandling.RAISE_UNEXPECTED,
    )
    trainer.model.load_state_dict(state["model"])
    with torch.no_grad():
        trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.num_steps = 0  # its load_state_dict adds to the count
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.num_updates = state["num_updates"]
    if same:
        _set_generators(state["generators"][0])


def _state(trainer: Trainer, *, is_loading: bool, with_generators: bool) -> dict[str, Any]:
    """What a checkpoint holds; on loading the template that says which part this rank needs."""
    model = trainer.model.sharded_state_dict(metadata=dict(SHARDING))
    state = {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(SHARDING)),
        "scheduler": trainer.scheduler.state_dict(),
        "num_updates": trainer.num_updates,
    }
    return state | ({"generators": _generators()} if with_generators else {})


def _generators() -> ShardedObject:
    """Every random state, one per tensor-parallel rank; data-parallel ranks share theirs."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "generators",
        [states],
        (1, parallel_state.get_tensor_model_parallel_world_size()),
        (0, parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _describe(trainer: Trainer) -> dict[str, Any]:
    return {
        "format": 1,
        "sharding": SHARDING["distrib_optim_sharding_type"],
        "layout": {
            "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
            "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
            "data_parallel": parallel_state.get_data_parallel_world_size(),
        },
        "dtype": str(trainer.model.config.params_dtype).removeprefix("torch."),
        "tensors": {name: list(tensor.shape) for name, tensor in trainer.model.physical.items()},
    }


def _check_same_model(path: Path, stored: dict[str, Any], own: dict[str, Any]) -> None:
    """Megatron itself would load an embedding of another size without a word."""
    have, want = stored["tensors"], own["tensors"]
    wrong = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
    problems = [f"{name}: checkpoint {have.get(name)}, model {want.get(name)}" for name in wrong[:10]]
    for field in ("format", "dtype"):
        if stored[field] != own[field]:
            problems.append(f"{field}: checkpoint {stored[field]!r}, here {own[field]!r}")
    if problems:
        raise ValueError(
            f"{path}: not a checkpoint of this model, {len(wrong)} tensor(s) differ: " + "; ".join(problems)
        )


def _on_rank_zero(action: Callable[[], None]) -> None:
    _together(action if dist.get_rank() == 0 else lambda: None)


def _together(action: Callable[[], None]) -> None:
    """Runs it on every rank; an error anywhere is an error everywhere."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:
        error = caught
    raise_together(error)


def _supported(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those options that this Megatron-Core's function takes."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}
