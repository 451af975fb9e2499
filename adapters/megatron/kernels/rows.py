"""Rows taken by index, whole rows at a time. The reference is `elementwise.take_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x [N, ...] and int64 rows [M], zeros where a row is negative. Without gradients."""
    out = torch.empty(len(rows), *x.shape[1:], device=x.device, dtype=x.dtype)
    if len(x) and not x[0].is_contiguous():
        x = x.contiguous()
    width = x[0].numel() if len(x) else 0
    if len(rows) and width:
        _take[(len(rows),)](x, rows, out, x.stride(0), width, BLOCK=min(triton.next_power_of_2(width), 2048))
    return out


@triton.jit
def _take(x, rows, out, stride, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=(column < width) & (row >= 0), other=0.0)
        tl.store(out + place * width + column, value, mask=column < width)
