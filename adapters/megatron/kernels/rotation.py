"""Rotary embedding in one pass over memory, forward and backward. The reference is `rotary.rotate`.

Legend: N rows, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves of each head [N, H, D] by angles whose cos and sin [N, 1, D] are fp32, equal in both halves."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, forwards=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turn(grad, *ctx.saved_tensors, forwards=False), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, forwards: bool) -> Tensor:
    x, (count, heads, width) = x.contiguous(), x.shape
    assert cos.stride(0) == sin.stride(0) == width and cos.stride(2) == sin.stride(2) == 1
    out = torch.empty_like(x)
    if count:
        _rotate[(count,)](
            x,
            cos,
            sin,
            out,
            heads,
            HALF=width // 2,
            HALF_BLOCK=triton.next_power_of_2(width // 2),
            HEADS_BLOCK=triton.next_power_of_2(heads),
            FORWARDS=forwards,
        )
    return out


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    FORWARDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF_BLOCK)
    head = tl.arange(0, HEADS_BLOCK)
    inside = (head[:, None] < heads) & (column[None, :] < HALF)
    place = (row * heads + head[:, None]) * (2 * HALF) + column[None, :]
    first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = row * (2 * HALF) + column
    c = tl.load(cos + angle, mask=column < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=column < HALF, other=0.0)[None, :]
    if not FORWARDS:
        s = -s
    tl.store(out + place, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
