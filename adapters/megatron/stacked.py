"""Parameters that hold many tensors of the checkpoint, one behind the other: experts, stacked for a grouped product.

The stack is how a rank computes; everywhere else (Megatron checkpoints, Hugging Face directories, publications) each
tensor goes by its own name. Expert parallelism divides a stack along its first dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

_PLACE = "@"  # stands for "{expert}.{part}" in a checkpoint key until the experts are taken apart


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a parameter [count, len(parts) * rows, columns] of this rank holds.

    Tensor `{prefix}{first + i}.{parts[j]}.weight` is slice i, and within it the j-th of equal blocks of rows.
    """

    parts: tuple[str, ...]
    """The projections of one expert, in the order of their rows."""
    first: int
    """Number of this rank's first expert."""
    count: int
    """Experts on this rank."""

    def names(self, prefix: str, first: int, count: int) -> Iterator[str]:
        """Names of `count` experts' tensors from expert `first` on, in the order of `slices`."""
        for expert in range(first, first + count):
            yield from (f"{prefix}{expert}.{part}.weight" for part in self.parts)

    def slices(self, stack: Tensor) -> Iterator[Tensor]:
        """Views of the tensors in a stack of any number of experts."""
        for expert in stack.unbind(0):
            yield from expert.chunk(len(self.parts), 0)

    def views(self, prefix: str, stack: Tensor) -> dict[str, Tensor]:
        """This rank's tensors by name, as views of its stack."""
        return dict(zip(self.names(prefix, self.first, self.count), self.slices(stack), strict=True))

    def gather(self, prefix: str, stack: Tensor) -> dict[str, Tensor]:
        """Every expert's tensors by name, on the CPU, in one collective that every expert-parallel rank must join."""
        group = parallel_state.get_expert_model_parallel_group()
        parts = [torch.empty_like(stack) for _ in range(group.size())]
        torch.distributed.all_gather(parts, stack.contiguous(), group=group)
        whole = torch.cat(parts).cpu()
        return dict(zip(self.names(prefix, 0, len(whole)), self.slices(whole), strict=True))

    def sharded(self, prefix: str, parameter: nn.Parameter) -> ShardedTensorFactory:
        """The stack for Megatron's checkpoints, which keep each expert's tensors, masters and moments by name."""

        def build(key: str, stack: Tensor, replica_id: Any, flattened_range: slice | None) -> dict[str, ShardedTensor]:
            if flattened_range is not None:
                raise RuntimeError(f"{key}: a flattened part of stacked experts cannot be named; use fully_reshardable")
            names = self.names("", self.first, self.count)
            keys = [key.replace(f"{_PLACE}.weight", name) for name in names]
            return {
                key: ShardedTensor.from_rank_offsets(key, part, replica_id=replica_id)
                for key, part in zip(keys, self.slices(stack), strict=True)
            }

        def merge(loaded: dict[str, Tensor]) -> Tensor:
            by_name = {key.rpartition(prefix)[2]: part for key, part in loaded.items()}
            parts = [by_name[name] for name in self.names("", self.first, self.count)]
            each = len(self.parts)
            return torch.stack([torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)])

        # Replicas of an expert are the ranks that hold the same experts, whatever their place in tensor parallelism.
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return ShardedTensorFactory(f"{prefix}{_PLACE}.weight", parameter, build, merge, replica)
