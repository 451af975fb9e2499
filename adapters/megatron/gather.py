"""Rows taken by index whose gradients are taken by index too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapters.megatron.device_copy import to_device


@dataclass(frozen=True, kw_only=True)
class Gather:
    """y = x[rows], and its gradient as another gather: dx = dy[inverse], zero where a row of x is not used.

    The gradient of plain indexing adds, atomically, in an order that changes from run to run.
    """

    rows: Tensor
    """int64, a row of x for each row of y."""
    inverse: Tensor
    """int64, for each row of x the one row of y that passes a gradient to it."""
    unused: Tensor | None = None
    """[rows of x, 1, 1] bool, True where there is none; None when all have one."""

    def to(self, device: torch.device | str) -> Gather:
        unused = None if self.unused is None else to_device(self.unused, device)
        return Gather(rows=to_device(self.rows, device), inverse=to_device(self.inverse, device), unused=unused)

    def __call__(self, x: Tensor) -> Tensor:
        return _Rows.apply(x, self)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.index_select(0, ctx.gather.inverse)
        return own if ctx.gather.unused is None else own.masked_fill_(ctx.gather.unused, 0), None
