"""Rotary embedding in one pass over memory, forward and backward. The reference is `rotary.rotate`.

Legend: N rows, H heads, K key/value heads, D head width.
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


def rotated_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values, of all three side by side [N, (H + 2 K) D].

    The values are copied: as a view they would keep the other two. The gradients are written into one tensor.
    """
    return _RotatedHeads.apply(joined, cos, sin, num_heads, num_kv_heads)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, torch.empty(x.shape, device=x.device, dtype=x.dtype), forwards=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, torch.empty_like(grad), forwards=False), None, None


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.heads = [num_heads, num_kv_heads, num_kv_heads]
        q, k, v = joined.unflatten(1, (sum(ctx.heads), -1)).split(ctx.heads, 1)
        q, k = (_turn(x, cos, sin, x.new_empty(x.shape), forwards=True) for x in (q, k))
        return q, k, v.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors  # once: recomputed activations can be had only once
        into = grads[0].new_empty(len(grads[0]), sum(ctx.heads), grads[0].shape[-1])
        *turned, values = into.split(ctx.heads, 1)
        for grad, target in zip(grads, turned, strict=False):
            _turn(grad, cos, sin, target, forwards=False)
        values.copy_(grads[2])
        return into.flatten(1), None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, forwards: bool) -> Tensor:
    """Writes into `out`; both may be every so many heads of wider rows."""
    count, heads, width = x.shape
    if x.stride()[1:] != (width, 1):
        x = x.contiguous()
    assert out.stride()[1:] == (width, 1) and cos.stride(0) == sin.stride(0) == width
    if count:
        _rotate[(count,)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            out.stride(0),
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
    x_stride,
    out_stride,
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
    place = head[:, None] * (2 * HALF) + column[None, :]
    source = x + row * x_stride + place
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = row * (2 * HALF) + column
    c = tl.load(cos + angle, mask=column < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=column < HALF, other=0.0)[None, :]
    if not FORWARDS:
        s = -s
    target = out + row * out_stride + place
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
