"""Projections of one input as one matrix product on CUDA: a wider product is faster, and gradients of the input that
several products would leave are not summed in memory.

The weights stay parameters of their own, for checkpoint and optimizer; putting them side by side takes a hundredth of
the product's time. Legend: N rows, I input width, O output widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.megatron.elementwise import is_fused


def can_join(x: Tensor, parts: Sequence[nn.Module]) -> bool:
    """Whether `joined` may replace calls of the parts: in half precision on CUDA, if nothing has to happen before each
    of them, such as a wait for its parameters."""
    return is_fused(x) and not any(part._forward_pre_hooks for part in parts)


def joined(x: Tensor, parts: Sequence[nn.Module]) -> Tensor:
    """[N, I] -> [N, sum of O], the products with the parts' weights [O, I] side by side. The parts have no bias, and
    their caller reduces the input's gradient over ranks, as for `parallel.Column`."""
    return _Joined.apply(x, *(part.weight for part in parts))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, torch.cat(weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_x = grad @ torch.cat(weights) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return d_x, *(None for _ in weights)
        parts = (grad.t() @ x).split([len(weight) for weight in weights])
        return d_x, *(part if wanted else None for part, wanted in zip(parts, ctx.needs_input_grad[1:], strict=True))
