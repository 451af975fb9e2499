"""Starts and stops the process groups of a trainer process, and lets ranks agree on errors.

A trainer process is started by torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment) or runs alone.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from adapters.megatron import cpu_runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """How the processes divide the work. What tensor and expert parallelism leave over is data parallelism."""

    tensor_parallel: int = 1
    """Ranks that share one copy of the model, each with a slice of every projection."""
    expert_parallel: int = 1
    """Ranks that share the experts of a layer among them, each with some experts."""
    expert_tensor_parallel: int = 1
    """Ranks that share each of those experts, every one with a slice of its width."""
    seed: int = 0
    """Seeds Python, NumPy, torch and Megatron's tracker."""
    deterministic: bool = True
    """On CUDA: sums whose order is open are made in a fixed one, so that a resumed run is bitwise the one that went on.
    On the CPU they are anyway."""
    deadline_seconds: float = 600.0
    """Longest wait in a collective; a rank that died is an error within it, never a hang."""

    def __post_init__(self) -> None:
        rules = {
            "tensor_parallel": (self.tensor_parallel >= 1, "an integer >= 1"),
            "expert_parallel": (self.expert_parallel >= 1, "an integer >= 1"),
            "expert_tensor_parallel": (self.expert_tensor_parallel >= 1, "an integer >= 1"),
            "seed": (0 <= self.seed < 1 << 32, "in [0, 2**32)"),
            "deadline_seconds": (math.isfinite(self.deadline_seconds) and self.deadline_seconds > 0, "> 0"),
        }
        if bad := [f"{n}: got {getattr(self, n)!r}, expected {want}" for n, (ok, want) in rules.items() if not ok]:
            raise ValueError("RuntimeSettings " + "; ".join(bad))


class StepRefused(RuntimeError):
    """An optimizer step that was not made, on any rank. `kind` says why, `steps_made` how many of the update were."""

    steps_made = 0

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def initialize(settings: RuntimeSettings) -> None:
    """Joins the process group, builds Megatron's parallel groups and seeds every generator.

    Installs the CPU runtime when no CUDA device exists. Call it once, before any model is built, on every rank.

    Raises:
        ValueError: the ranks cannot be divided as asked.
    """
    on_cpu = cpu_runtime.install()
    cpu_runtime.define_missing_te_names()
    world = int(os.environ.get("WORLD_SIZE", 1))
    # Experts are divided among ranks of any kind: those of one tensor-parallel group too.
    expert_ranks = settings.expert_parallel * settings.expert_tensor_parallel
    if world % settings.tensor_parallel or world % expert_ranks:
        raise ValueError(
            f"got {world} rank(s), expected a multiple of tensor_parallel = {settings.tensor_parallel} and of "
            f"expert_parallel * expert_tensor_parallel = {expert_ranks}"
        )
    deadline = timedelta(seconds=settings.deadline_seconds)
    _join(on_cpu=on_cpu, world=world, deadline=deadline)
    _divide(settings)
    _seed(settings.seed)
    if not on_cpu and settings.deterministic:
        _repeat_bitwise()


def shutdown() -> None:
    """Leaves the groups. Idempotent."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def freeze_objects() -> int:
    """Leaves every object that exists now out of Python's garbage collection, and logs how many those are.

    Call it once in a trainer process, when everything is started and loaded and before the first update. Imports and
    the model leave a third of a million tracked objects, and a full collection, which comes about once in four updates
    in the middle of a forward pass, walks all of them: a quarter of a second and more, on one rank while the others
    wait. Objects of the start live as long as the process, so the collector need not walk them. What is made later is
    collected as ever, and a frozen object is still freed when its last reference goes: only frozen cycles are not. So a
    process that builds one trainer after another must not call this.

    Returns:
        The number of objects that are left out.
    """
    gc.collect()  # else what is garbage already would stay for good
    gc.freeze()
    count = gc.get_freeze_count()
    logger.info("garbage collection leaves out %d objects of the start", count)
    return count


def raise_together(error: BaseException | None) -> None:
    """Ends a phase that can fail on one rank alone: if it failed anywhere, raises on every rank.

    Every rank must call it at the same point, with its own error or None; a rank that skips it strands the others until
    their deadline.

    Raises:
        BaseException: this rank's own error, or a RuntimeError that quotes the first failing rank's; a StepRefused if
            that one is.
    """
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return
    every: list[tuple[str, str | None] | None] = [None] * dist.get_world_size()
    own = None if error is None else (f"{type(error).__name__}: {error}", getattr(error, "kind", None))
    dist.all_gather_object(every, own)
    rank, (text, kind) = next((rank, found) for rank, found in enumerate(every) if found is not None)
    if error is not None and getattr(error, "kind", None) == kind:
        raise error
    message = f"rank {rank} failed and all ranks stop: {text}"
    raise RuntimeError(message) if kind is None else StepRefused(kind, message)


def require_equal(what: str, digest: int) -> None:
    """Checks that every rank has the same digest (in [0, 2**63)) of something.

    Raises:
        RuntimeError: on every rank, naming the ranks that differ from rank 0.
    """
    mine = torch.tensor([digest], dtype=torch.int64, device=device())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    values = [int(each) for each in every]
    if odd := [rank for rank, value in enumerate(values) if value != values[0]]:
        raise RuntimeError(f"ranks {odd} have another version of {what} than rank 0; every rank must be given the same")


def _join(*, on_cpu: bool, world: int, deadline: timedelta) -> None:
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
    if world > 1:
        dist.init_process_group(backend, timeout=deadline)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=deadline)


def _divide(settings: RuntimeSettings) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        expert_tensor_parallel_size=settings.expert_tensor_parallel,
        distributed_timeout_minutes=settings.deadline_seconds / 60,
    )


def _seed(seed: int) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _repeat_bitwise() -> None:
    """An operation that has no fixed order warns; `varlen` sees to the one that torch then leaves open."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor
