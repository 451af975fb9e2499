"""RMSNorm in one pass over memory, forward and backward. The reference is `elementwise.rms_norm`.

Legend: N rows, H width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
"""Most partial sums of the weight's gradient; each is made by one program, over rows in ascending order."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32 and rounded to x's dtype once, as vLLM's kernel does.

    Args:
        x: [..., H] bf16 or fp16.
        weight: [H] of the same dtype.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        scales = torch.empty(len(rows), device=x.device, dtype=torch.float32)
        width = rows.shape[1]
        if len(rows):
            _forward[(len(rows),)](rows, weight, out, scales, width, eps, BLOCK=triton.next_power_of_2(width))
        ctx.save_for_backward(rows, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        count, width = rows.shape
        grads = grad.reshape(count, width).contiguous()
        dx = torch.empty_like(rows)
        programs = max(1, min(count, PROGRAMS))
        partial = torch.empty(programs, width, device=rows.device, dtype=torch.float32)
        _backward[(programs,)](
            rows, weight, scales, grads, dx, partial, count, width, BLOCK=triton.next_power_of_2(width)
        )
        return dx.view(grad.shape), partial.sum(0).to(weight.dtype), None


@triton.jit
def _forward(x, weight, out, scales, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(scales + row, scale)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, weight, scales, grads, dx, partial, count, width, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, count, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * width + columns
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        normed = value * scale
        summed += grad * normed
        grad = grad * factor
        mean = tl.sum(grad * normed, axis=0) / width
        tl.store(dx + place, (scale * (grad - normed * mean)).to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * width + columns, summed, mask=inside)
