"""A matrix whose memory lies in blocks of rows, as matrix kernels pack their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """A matrix [rows, columns]: `memory[b, c, r]`, [rows / R, columns, R], is its element at (b * R + r, c)."""

    memory: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        count, columns, rows = self.memory.shape
        return count * rows, columns

    def narrow(self, dim: int, start: int, length: int) -> Blocks | torch.Tensor:
        """The part at [start, start + length) along a dimension: a view if it is made of whole blocks, else a copy."""
        rows = self.memory.shape[2]
        if (start, length) == (0, self.shape[dim]):
            return self
        if dim == 0 and start % rows == length % rows == 0:
            return Blocks(self.memory.narrow(0, start // rows, length // rows))
        return self.dense().narrow(dim, start, length)

    def dense(self) -> torch.Tensor:
        """A copy in rows."""
        return self.memory.transpose(1, 2).reshape(self.shape)
