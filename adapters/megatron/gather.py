"""Rows taken by index whose gradients are taken by index too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapters.megatron.device_copy import to_device
from adapters.megatron.elementwise import take_rows


@dataclass(frozen=True, kw_only=True)
class Gather:
    """y = x[rows], and its gradient as another gather: dx = dy[inverse].

    The gradient of plain indexing adds, atomically, in an order that changes from run to run.
    """

    rows: Tensor
    """int64, a row of x for each row of y."""
    inverse: Tensor
    """int64, for each row of x the one row of y that passes a gradient to it, -1 where there is none."""

    def to(self, device: torch.device | str) -> Gather:
        return Gather(rows=to_device(self.rows, device), inverse=to_device(self.inverse, device))

    def __call__(self, x: Tensor) -> Tensor:
        return _Rows.apply(x, self)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return take_rows(x, gather.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return take_rows(grad, ctx.gather.inverse), None
