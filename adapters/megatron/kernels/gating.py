"""silu(gate) * up in one pass over memory, forward and backward. The reference is `elementwise.gated`.

Legend: N rows, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """[N, W] each, in bf16 or fp16; silu is rounded before the product."""
    return _Gated.apply(gate, up)


def gated_halves(x: Tensor) -> Tensor:
    """The same of [N, 2 W], whose first half is the gate: both gradients are written into one tensor."""
    return _GatedHalves.apply(x)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _run_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _run_backward(gate, up, grad, d_gate, d_up)
        return d_gate, d_up


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return _run_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        into = torch.empty_like(x)
        (gate, up), (d_gate, d_up) = x.chunk(2, -1), into.chunk(2, -1)
        _run_backward(gate, up, grad, d_gate, d_up)
        return into


def _run_forward(gate: Tensor, up: Tensor) -> Tensor:
    count, width = gate.shape
    out = torch.empty(count, width, device=gate.device, dtype=gate.dtype)
    if count:
        _forward[(count, triton.cdiv(width, BLOCK))](gate, up, out, gate.stride(0), width, BLOCK=BLOCK)
    return out


def _run_backward(gate: Tensor, up: Tensor, grad: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    count, width = gate.shape
    if count:
        _backward[(count, triton.cdiv(width, BLOCK))](
            gate, up, grad.contiguous(), d_gate, d_up, gate.stride(0), d_gate.stride(0), width, BLOCK=BLOCK
        )


@triton.jit
def _forward(gate, up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate, up, grad, d_gate, d_up, stride, d_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    kind = d_gate.dtype.element_ty
    tl.store(d_up + row * d_stride + column, (d * (g * share).to(kind).to(tl.float32)).to(kind), mask=inside)
    tl.store(d_gate + row * d_stride + column, (d * u * share * (1 + g * (1 - share))).to(kind), mask=inside)
