"""Tokens to the rows of their experts and back, where all experts live on this rank.

Every token has K rows. Going there is a gather, coming back a sum of K gathered rows; each is the other's gradient, so
nothing is added atomically. The reference are Megatron's dispatchers. Legend: T tokens, K rows of each, N = T K rows in
expert order, H width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters.megatron.kernels.rows import take_rows


class Places(NamedTuple):
    """Which row is whose."""

    choices: Tensor
    """[N] int64 the entry of the tokens' experts [T, K], flattened, that each row stands for: by expert, then token."""
    rows: Tensor
    """[T, K] int64 the row of each entry."""
    tokens: Tensor
    """[N] int64 the token of each row."""


def places(experts: Tensor) -> Places:
    """Of [T, K] int64, the experts of each token in ascending order."""
    top_k = experts.shape[1]
    choices = experts.flatten().argsort(stable=True)
    return Places(choices, choices.argsort().view(-1, top_k), choices // top_k)


def spread(x: Tensor, to: Places) -> Tensor:
    """[T, H] -> [N, H], each token once for each of its experts."""
    return _Spread.apply(x, to)


def collect(rows: Tensor, to: Places) -> Tensor:
    """[N, H] -> [T, H], the sum of each token's rows, in fp32 and by ascending expert."""
    return _Collect.apply(rows, to)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """rows [N, H] * factors [N] fp32, in rows' dtype."""
    return _Scaled.apply(rows, factors)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Places) -> Tensor:
        ctx.to = to
        return take_rows(x, to.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.to.rows), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: Places) -> Tensor:
        ctx.to = to
        return _sum(rows, to.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return take_rows(grad, ctx.to.tokens), None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor) -> Tensor:
        rows, factors = rows.contiguous(), factors.contiguous()
        ctx.save_for_backward(rows, factors)
        out = torch.empty_like(rows)
        count, width = rows.shape
        if count:
            _scale[(count,)](rows, factors, out, width, BLOCK=triton.next_power_of_2(width))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, factors = ctx.saved_tensors
        d_rows, d_factors = torch.empty_like(rows), torch.empty_like(factors)
        count, width = rows.shape
        if count:
            block = triton.next_power_of_2(width)
            _scale_backward[(count,)](rows, factors, grad.contiguous(), d_rows, d_factors, width, BLOCK=block)
        return d_rows, d_factors


def _sum(x: Tensor, rows: Tensor) -> Tensor:
    x, (count, top_k), width = x.contiguous(), rows.shape, x.shape[1]
    out = torch.empty(count, width, device=x.device, dtype=x.dtype)
    if count:
        _gather_sum[(count,)](x, rows, out, width, TOP_K=top_k, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _gather_sum(x, rows, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + k)
        total += tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale(rows, factors, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(factors + row)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_backward(rows, factors, grads, d_rows, d_factors, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grads + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_factors + row, tl.sum(grad * value, axis=0))
    grad = grad * tl.load(factors + row)
    tl.store(d_rows + row * width + column, grad.to(d_rows.dtype.element_ty), mask=inside)
