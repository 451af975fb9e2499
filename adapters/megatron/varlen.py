"""Attention of one pass as one packed causal batch: torch's flash kernel for sequences of any lengths.

Each sequence is cut behind its last active token. Every place of what is left gets a query and a key, in stream order,
so boundaries alone say what a query may see; queries of tokens that have left are computed and never read. In a pass at
full depth, and in those of a fixed depth (where the last loops run the prompts alone), there are none of those.

Legend: T packed tokens, N active rows of a pass, M places, S sequences with an active token, H heads, K key/value
heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.megatron import determinism
from adapters.megatron.attention_view import AttentionView, PackedPass
from adapters.megatron.device_copy import to_device
from adapters.megatron.gather import Gather

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""(q [M, H, D], k [M, K, D], v [M, K, D], cu_seqlens, longest) -> [M, H, D], causal within each sequence."""


def packed_pass(
    *, sequences: Tensor, positions: Tensor, restore: Tensor, active: Tensor, device: torch.device | str = "cpu"
) -> PackedPass:
    """The packed form of the pass in which the `active` [T] bool tokens run.

    Args:
        sequences: [T] int64 the sequence of each token of the stream.
        positions: [T] int64 its position there.
        restore: [T] int64 stream place -> sorted row; the active tokens are the first rows.
        device: where the result is used.
    """
    last = torch.full((int(sequences[-1]) + 1,), -1).scatter_reduce(0, sequences[active], positions[active], "amax")
    kept = positions <= last[sequences]
    lengths = last[last >= 0] + 1
    key_rows, runs = restore[kept], active[kept]
    num_active, num_places = int(active.sum()), len(key_rows)
    num_key_rows = num_active if num_places == num_active else len(restore)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    keys = queries = outputs = None
    if not torch.equal(key_rows, torch.arange(num_places)):
        query_rows = torch.where(runs, key_rows, -1)
        query_places = torch.empty(num_active, dtype=torch.int64)
        query_places[key_rows[runs]] = runs.nonzero()[:, 0]
        key_places = torch.full((num_key_rows,), -1)
        key_places[key_rows] = torch.arange(num_places)
        keys = Gather(rows=key_rows, inverse=key_places).to(device)
        queries = Gather(rows=query_rows, inverse=query_places).to(device)
        outputs = Gather(rows=query_places, inverse=query_rows).to(device)
    return PackedPass(
        cu_seqlens=to_device(cu_seqlens, device),
        longest=int(lengths.max()),
        num_key_rows=num_key_rows,
        keys=keys,
        queries=queries,
        outputs=outputs,
    )


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, view: AttentionView) -> Tensor:
    """An `Attention` for CUDA in bf16 and fp16: FlashAttention 2, as torch carries it.

    Its gradients repeat bitwise when deterministic algorithms are on, also if these only warn.
    """
    return packed_attention(q, k, v, view, _flash)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, view: AttentionView, kernel: Kernel) -> Tensor:
    """An `Attention` made of any kernel for packed causal sequences."""
    packed = view.packed
    assert packed is not None, "replay_layout was not told that the packed form is needed"
    k, v = (_gather(x[: packed.num_key_rows], packed.keys) for x in (k, v))
    out = kernel(_gather(q, packed.queries), k, v, packed.cu_seqlens, packed.longest)
    return _gather(out, packed.outputs).flatten(1)


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return _Flash.apply(q, k, v, cu_seqlens, longest)


class _Flash(torch.autograd.Function):
    """The two operators under torch.nn.attention.varlen (the same in torch 2.11 and 2.13), which leaves the order of
    the sums in a query's gradient open wherever deterministic algorithms only warn."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, cu_seqlens = ctx.saved_tensors
        sizes = cu_seqlens, cu_seqlens, ctx.longest, ctx.longest
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)
        with determinism.strictly():
            grads = torch.ops.aten._flash_attention_backward(grad, *inputs, *sizes, 0.0, True, *no_dropout)
        return *grads, None, None


def _gather(x: Tensor, gather: Gather | None) -> Tensor:
    return x if gather is None else gather(x)
