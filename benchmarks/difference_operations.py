"""The engine's operations beside the trainer's on the same inputs: which of them round otherwise, and how often.

Random inputs in bf16 of a model's shape. An operation whose values never differ is no cause of a difference between
trainer and engine; one that differs is a cause, and how large it is says nothing yet about scores (`difference`). The
kernels are those of the engine on CUDA; on a CPU they show only that this runs, its engine takes others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters.megatron.attention import choose_attention, replay_layout
from adapters.megatron.elementwise import gated_halves, rms_norm, rotate
from adapters.megatron.rotary import rotary_embedding

SEQUENCES, LENGTH = 8, 128


def compare(config: Any, rows: int) -> list[dict[str, Any]]:
    """One row an operation: the share of values that differ, and the norm of the difference over the norm.

    Args:
        config: Ouro's.
        rows: of a decode step.
    """
    from vllm import _custom_ops  # noqa: F401  (loads the kernels)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for name, pair in _operations(config, rows, device):
        try:
            trainer, engine = (x.float() for x in pair())
            difference = trainer - engine
            found: dict[str, Any] = {
                "differing": float((difference != 0).float().mean()),
                "relative": float(difference.norm() / trainer.norm()),
            }
        except Exception as error:  # a kernel that this machine does not have
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        results.append({"name": name, **found})
        print(results[-1], flush=True)
    return results


def _operations(config: Any, rows: int, device: str) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)

    tokens, hidden, wide = SEQUENCES * LENGTH, config.hidden_size, config.intermediate_size
    x, norm_weight = noise(tokens, hidden), 1 + noise(hidden, std=0.05)
    up = noise(2 * wide, hidden, std=0.02)

    def norm() -> tuple[Tensor, Tensor]:
        theirs = torch.empty_like(x)
        torch.ops._C.rms_norm(theirs, x, norm_weight, config.rms_norm_eps)
        return rms_norm(x, norm_weight, config.rms_norm_eps), theirs

    def gate() -> tuple[Tensor, Tensor]:
        both = noise(tokens, 2 * wide)
        theirs = both.new_empty(tokens, wide)
        torch.ops._C.silu_and_mul(theirs, both)
        return gated_halves(both), theirs

    def rotation() -> tuple[Tensor, Tensor]:
        heads, width = config.num_heads, config.head_dim
        q, positions = noise(tokens, heads, width), torch.arange(tokens, device=device) % LENGTH
        cos, sin = rotary_embedding(positions, head_dim=width, theta=config.rope_theta, dtype=torch.bfloat16)
        known = torch.arange(LENGTH, device=device)
        angles = rotary_embedding(known, head_dim=width, theta=config.rope_theta, dtype=torch.bfloat16)
        cache = torch.cat([part[:, 0, : width // 2] for part in angles], -1).to(torch.bfloat16)
        theirs, keys = q.flatten(1).clone(), q.flatten(1).clone()
        torch.ops._C.rotary_embedding(positions, theirs, keys, width, cache, True)
        return rotate(q, cos, sin).flatten(1), theirs

    def product(weight: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, weight), torch.cat([F.linear(part, weight) for part in x.split(rows)])

    def attention(*, decode: bool) -> tuple[Tensor, Tensor]:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        q, k, v = (noise(tokens, heads, config.head_dim) for heads in (config.num_heads, *2 * [config.num_kv_heads]))
        bounds = torch.arange(0, tokens + 1, LENGTH)
        kernel = choose_attention(torch.bfloat16, torch.device(device))
        view = replay_layout(bounds, None, max_passes=1, device=device, attention=kernel).views[0]
        ours, keys = kernel(q, k, v, view), bounds.to(device, torch.int32)
        last = bounds[1:].to(device) - 1
        theirs = flash_attn_varlen_func(
            q=q[last] if decode else q,
            k=k,
            v=v,
            max_seqlen_q=1 if decode else LENGTH,
            cu_seqlens_q=torch.arange(SEQUENCES + 1, device=device, dtype=torch.int32) if decode else keys,
            max_seqlen_k=LENGTH,
            cu_seqlens_k=keys,
            causal=True,
            fa_version=get_flash_attn_version(),
        )
        return ours[last] if decode else ours, theirs.flatten(1)

    yield "norm", norm
    yield "gate", gate
    yield "rotation", rotation
    yield f"product of gate and up: all rows, {rows} at a time", lambda: product(up)
    yield f"product of the head: all rows, {rows} at a time", lambda: product(noise(4096, hidden, std=0.02))
    yield "attention of prompts: kernels of trainer and engine", lambda: attention(decode=False)
    yield "attention of one token: kernels of trainer and engine", lambda: attention(decode=True)
