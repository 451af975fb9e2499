"""Parameters that hold many tensors of the checkpoint, one behind the other: experts, stacked for a grouped product.

The stack is how a rank computes; everywhere else (Megatron checkpoints, Hugging Face directories, publications) each
tensor goes by its own name. Expert parallelism divides a stack along its first dimension, expert tensor parallelism
cuts every tensor in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

_LEAF = re.compile(r"(?P<prefix>.*\.)(?P<parts>[a-z_]+)__(?P<first>\d+)__(?P<last>\d+)")
_PLACE = "@"  # stands for "{expert}.{part}" in a checkpoint key until the experts are taken apart


@dataclass(frozen=True)
class Cut:
    """A rank's part of a tensor: the `rank`-th of `size` equal ones along `dim`; all of it if that is None."""

    dim: int | None
    rank: int
    size: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The part's shape, of a whole tensor's."""
        return tuple(n // self.size if dim == self.dim else n for dim, n in enumerate(whole))


def gather_whole(part: Tensor, dim: int | None, group: dist.ProcessGroup) -> Tensor:
    """A tensor cut over the ranks of a group, whole on each. Every one of them must call it, in the same order."""
    if dim is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """What a parameter [count, len(parts) * rows, columns] holds.

    Tensor `{prefix}{first + i}.{parts[j]}.weight` is slice i, and within it the j-th of equal blocks of rows.
    """

    parts: tuple[str, ...]
    """The projections of one expert, in the order of their rows."""
    first: int
    """Number of the first expert."""
    count: int
    """How many experts."""

    @property
    def leaf(self) -> str:
        """The parameter's own name: it says what the stack holds, so that no two ranks' stacks share a name."""
        return "__".join((*self.parts, f"{self.first}", f"{self.first + self.count - 1}"))

    def names(self, prefix: str, first: int, count: int) -> Iterator[str]:
        """Names of `count` experts' tensors from expert `first` on, in the order of `slices`."""
        for expert in range(first, first + count):
            yield from (f"{prefix}{expert}.{part}.weight" for part in self.parts)

    def slices(self, stack: Tensor) -> Iterator[Tensor]:
        """Views of the tensors in a stack of any number of experts."""
        for expert in stack.unbind(0):
            yield from expert.chunk(len(self.parts), 0)

    def views(self, prefix: str, stack: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of their stack."""
        return dict(zip(self.names(prefix, self.first, self.count), self.slices(stack), strict=True))


def parse_stack(name: str) -> tuple[str, Stacked] | None:
    """The prefix and the stack that a parameter's whole name says (see `Stacked.leaf`); None for any other name."""
    found = _LEAF.fullmatch(name)
    if found is None:
        return None
    first, last = int(found["first"]), int(found["last"])
    return found["prefix"], Stacked(parts=tuple(found["parts"].split("__")), first=first, count=last - first + 1)


@dataclass(frozen=True, kw_only=True)
class Stack(Stacked):
    """This rank's stack."""

    dim: int
    """The dimension of each tensor that expert tensor parallelism cuts."""

    @property
    def cut(self) -> Cut:
        """This rank's part of each of its experts' tensors."""
        rank = parallel_state.get_expert_tensor_parallel_rank()
        return Cut(self.dim, rank, parallel_state.get_expert_tensor_parallel_world_size())

    def gather(self, prefix: str, stack: Tensor) -> dict[str, Tensor]:
        """Every expert's tensors by name, views of the stack where this rank has all of them whole.

        Collective: every rank that has a part of an expert must join.
        """
        each = stack.unflatten(1, (len(self.parts), -1))
        each = gather_whole(each, 2 + self.dim, parallel_state.get_expert_tensor_parallel_group())
        each = gather_whole(each, 0, parallel_state.get_expert_model_parallel_group())
        whole = each.flatten(1, 2)
        return dict(zip(self.names(prefix, 0, len(whole)), self.slices(whole), strict=True))

    def sharded(self, prefix: str, parameter: nn.Parameter) -> ShardedTensorFactory:
        """The stack for Megatron's checkpoints, which keep each expert's tensors, masters and moments by name."""

        def build(key: str, stack: Tensor, replica_id: Any, flattened_range: slice | None) -> dict[str, ShardedTensor]:
            if flattened_range is not None:
                raise RuntimeError(f"{key}: a flattened part of stacked experts cannot be named; use fully_reshardable")
            names = self.names("", self.first, self.count)
            keys = [key.replace(f"{_PLACE}.weight", name) for name in names]
            offset = (cut.dim, cut.rank, cut.size)
            return {
                key: ShardedTensor.from_rank_offsets(key, part, offset, replica_id=replica_id)
                for key, part in zip(keys, self.slices(stack), strict=True)
            }

        def merge(loaded: dict[str, Tensor]) -> Tensor:
            by_name = {key.rpartition(prefix)[2]: part for key, part in loaded.items()}
            parts = [by_name[name] for name in self.names("", self.first, self.count)]
            each = len(self.parts)
            return torch.stack([torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)])

        cut = self.cut
        # Replicas of an expert are the ranks that hold the same part of it, wherever the rest of the model is cut.
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return ShardedTensorFactory(f"{prefix}{_PLACE}.weight", parameter, build, merge, replica)
