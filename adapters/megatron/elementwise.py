"""What stands between matrix products: norms, rotation, gates. On CUDA in half precision each is one Triton kernel.

Written with torch's own operations, these read and write memory several times over and take a third of a layer's time.
The formulas here are the reference, and what runs everywhere else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def is_fused(x: Tensor) -> bool:
    """Whether the Triton kernels take it."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32, rounded to x's dtype as `weighted` says."""
    if is_fused(x):
        from adapters.megatron.kernels import norm

        return norm.rms_norm(x, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weighted(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps), weight, x)


def weighted(normed: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """normed * weight in x's dtype, rounded where vLLM's norm rounds on the same device.

    On CUDA that is once, after the weight; elsewhere, as in transformers, before it too. It is the largest of what can
    set trainer and engine apart in bf16 (docs/gpu.md).

    Args:
        normed: x / rms(x) in fp32, or wider.
        weight: of x's dtype.
    """
    if is_fused(x):
        return (normed * weight.to(normed.dtype)).to(x.dtype)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves of each head [N, heads, D] by their angles [N, 1, D], in cos's dtype, returned in x's."""
    if is_fused(x):
        from adapters.megatron.kernels import rotation

        return rotation.rotate(x, cos, sin)
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def rotated_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values, [N, heads, D] each, of all three side by side."""
    if is_fused(joined):
        from adapters.megatron.kernels import rotation

        return rotation.rotated_heads(joined, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = joined.unflatten(1, (sum(heads), -1)).split(heads, 1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of [N, W] each."""
    if is_fused(gate):
        from adapters.megatron.kernels import gating

        return gating.gated(gate, up)
    return F.silu(gate) * up


def gated_halves(x: Tensor) -> Tensor:
    """The same of [N, 2 W] -> [N, W]; the first half is the gate."""
    if is_fused(x):
        from adapters.megatron.kernels import gating

        return gating.gated_halves(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def scaled_rows(x: Tensor, factors: Tensor) -> Tensor:
    """x [N, W] * factors [N], computed in the wider of their dtypes, returned in x's."""
    if is_fused(x) and factors.dtype == torch.float32:
        from adapters.megatron.kernels import experts

        return experts.scaled(x, factors)
    return (x * factors[:, None]).to(x.dtype)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x [N, ...] and int64 rows [M], zeros where a row is negative."""
    if is_fused(x):
        from adapters.megatron.kernels import rows as kernels

        return kernels.take_rows(x, rows)
    taken = x.index_select(0, rows.clamp(min=0))
    return taken.masked_fill_((rows < 0).view(-1, *[1] * (x.dim() - 1)), 0)
