"""Replay of per-token pass counts over packed sequences: which rows are active in a pass, and what they attend to.

A looped model runs its layers several times; a token that has left keeps the keys and values of its last pass. The
packed tokens are sorted by pass count, largest first, so the rows active in a pass are a prefix: a pass slices, nothing
is scattered, and a token hands over its keys and values once, when it leaves. With equal counts this is plain packed
causal attention. Names no model.

Legend: T packed tokens (stream order: sequence by sequence), N active rows of a pass, S sequences, H heads,
K key/value heads, D head width; in a bucket B sequences, Q queries and L keys of each, both padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters.megatron.attention_view import Attention, AttentionView, Bucket
from adapters.megatron.device_copy import to_device
from adapters.megatron.varlen import packed_pass, varlen_attention


@dataclass(frozen=True, kw_only=True)
class ReplayLayout:
    """How one packed micro-batch runs. Built on the CPU once, so that no pass waits for the device."""

    order: Tensor
    """[T] int64: sorted row -> stream place."""
    restore: Tensor
    """[T] int64: stream place -> sorted row."""
    positions: Tensor
    """[T] int64: position of each sorted row in its sequence."""
    num_active: tuple[int, ...]
    """Rows active in each pass, a descending list, and 0 at its end: pass p keeps num_active[p + 1] rows after it."""
    views: tuple[AttentionView, ...]
    """One per pass that has an active row."""

    def is_left_read_after(self, index: int) -> bool:
        """Whether a pass behind pass `index` reads keys and values of rows that have left."""
        return any(view.num_key_rows > view.num_queries for view in self.views[index + 1 :])


def choose_attention(dtype: torch.dtype, device: torch.device) -> Attention:
    """The kernel for parameters of a dtype on a device."""
    half = dtype in (torch.bfloat16, torch.float16)
    return varlen_attention if device.type == "cuda" and half else sdpa_attention


def replay_layout(
    cu_seqlens: Tensor,
    num_passes: Tensor | None,
    *,
    max_passes: int,
    device: torch.device | str = "cpu",
    attention: Attention | None = None,
) -> ReplayLayout:
    """The layout of a packed micro-batch.

    Args:
        cu_seqlens: [S + 1] int, 0 first and T last; every sequence has a token.
        num_passes: [T] int, passes of each token in 1 .. max_passes; None lets every token run all of them.
        max_passes: passes of the deepest token.
        device: where the index tensors are used.
        attention: the kernel that will read the views, so that no form is made for another one; None is
            `sdpa_attention`.

    Raises:
        ValueError: boundaries that do not ascend from 0, or pass counts of another length or out of range.
    """
    cu_seqlens = cu_seqlens.to("cpu", torch.int64)
    num_tokens = int(cu_seqlens[-1])
    num_passes = _pass_counts(num_passes, num_tokens, max_passes)
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or int(lengths.min()) < 1:
        raise ValueError(f"cu_seqlens: got {cu_seqlens.tolist()[:10]!r}, expected ascending boundaries from 0")
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.arange(num_tokens) - cu_seqlens[sequences]
    order = torch.sort(num_passes, descending=True, stable=True).indices
    restore = torch.empty_like(order)
    restore[order] = torch.arange(num_tokens)
    num_active = tuple(int((num_passes > p).sum()) for p in range(max_passes)) + (0,)
    stream = _Stream(cu_seqlens, lengths, sequences, positions, order, restore)
    views: list[AttentionView] = []
    for p, count in enumerate(num_active[:-1]):
        if count and (not views or count != views[-1].num_queries):
            views.append(_view(stream, num_passes > p, device, attention or sdpa_attention))
        elif count:
            views.append(views[-1])
    return ReplayLayout(
        order=to_device(order, device),
        restore=to_device(restore, device),
        positions=to_device(positions[order], device),
        num_active=num_active,
        views=tuple(views),
    )


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, view: AttentionView) -> Tensor:
    """The reference `Attention`: torch's scaled_dot_product_attention over dense buckets. Runs on every device."""
    outputs = []
    for bucket in view.buckets:
        queries = _batch(q, bucket.query_rows, bucket)
        keys, values = (_repeat(_batch(x, bucket.key_rows, bucket), q.shape[1]) for x in (k, v))
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bucket.mask, is_causal=bucket.mask is None
        )
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, view.bucket_places).flatten(1)


@dataclass(frozen=True)
class _Stream:
    """The packed sequences, on the CPU."""

    cu_seqlens: Tensor
    lengths: Tensor
    sequences: Tensor
    positions: Tensor
    order: Tensor
    restore: Tensor


def _pass_counts(num_passes: Tensor | None, num_tokens: int, max_passes: int) -> Tensor:
    if num_passes is None:
        return torch.full((num_tokens,), max_passes)
    num_passes = num_passes.to("cpu", torch.int64)
    if tuple(num_passes.shape) != (num_tokens,):
        raise ValueError(f"pass counts: got shape {tuple(num_passes.shape)}, expected ({num_tokens},), one per token")
    outside = ((num_passes < 1) | (num_passes > max_passes)).nonzero()[:, 0].tolist()
    if outside:
        got = [(place, int(num_passes[place])) for place in outside[:10]]
        raise ValueError(f"pass counts: got (place, count) {got!r}, expected 1 .. {max_passes}")
    return num_passes


def _view(stream: _Stream, active: Tensor, device: torch.device | str, attention: Attention) -> AttentionView:
    """The attention of one pass in which `active` [T] bool tokens run."""
    buckets, places, packed = list[Bucket](), stream.order[:0], None
    if attention is sdpa_attention:
        buckets, places = _buckets(stream, active)
    elif attention is varlen_attention:
        packed = packed_pass(
            sequences=stream.sequences,
            positions=stream.positions,
            restore=stream.restore,
            active=active,
            device=device,
        )
    rows = stream.order[: int(active.sum())]
    return AttentionView(
        num_queries=len(rows),
        query_sequences=to_device(stream.sequences[rows], device),
        query_positions=to_device(stream.positions[rows], device),
        cu_seqlens=to_device(stream.cu_seqlens, device),
        key_rows=to_device(stream.restore, device),
        num_key_rows=packed.num_key_rows if packed else len(stream.order),
        buckets=tuple(_move(bucket, device) for bucket in buckets),
        bucket_places=to_device(places[rows] if buckets else places, device),
        packed=packed,
    )


def _buckets(stream: _Stream, active: Tensor) -> tuple[list[Bucket], Tensor]:
    """The active tokens as dense batches, and the place of each, by stream place, in their concatenated output."""
    # Lengths within a factor of two share a bucket, so padding at most doubles a sequence.
    size_class = torch.ceil(torch.log2(stream.lengths.double())).long()[stream.sequences]
    places = torch.empty_like(stream.order)
    buckets: list[Bucket] = []
    base = 0
    for each in size_class.unique().tolist():
        chosen = (active & (size_class == each)).nonzero()[:, 0]
        if len(chosen):
            bucket, slots = _bucket(stream, chosen)
            places[chosen] = base + slots
            base += len(bucket.query_rows)
            buckets.append(bucket)
    return buckets, places


def _bucket(stream: _Stream, chosen: Tensor) -> tuple[Bucket, Tensor]:
    """The bucket of the active tokens `chosen` (stream places), and the slot of each in [0, B * Q)."""
    ids, batch, counts = stream.sequences[chosen].unique_consecutive(return_inverse=True, return_counts=True)
    slot = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[batch]
    num_queries, lengths = int(counts.max()), stream.lengths[ids]
    offsets = torch.arange(int(lengths.max())).expand(len(ids), -1)
    keys = stream.restore[stream.cu_seqlens[ids][:, None] + torch.minimum(offsets, lengths[:, None] - 1)]
    if bool((counts == lengths).all()):
        queries, mask = keys, None
    else:
        shape = (len(ids), num_queries)
        looks_up_to = torch.zeros(shape, dtype=torch.int64)  # padding sees position 0, so its softmax is defined
        looks_up_to[batch, slot] = stream.positions[chosen]
        queries = torch.zeros(shape, dtype=torch.int64)
        queries[batch, slot] = stream.restore[chosen]
        mask = (torch.arange(keys.shape[1]) <= looks_up_to[..., None])[:, None]
    bucket = Bucket(num_sequences=len(ids), query_rows=queries.flatten(), key_rows=keys.flatten(), mask=mask)
    return bucket, batch * num_queries + slot


def _move(bucket: Bucket, device: torch.device | str) -> Bucket:
    return Bucket(
        num_sequences=bucket.num_sequences,
        query_rows=to_device(bucket.query_rows, device),
        key_rows=to_device(bucket.key_rows, device),
        mask=None if bucket.mask is None else to_device(bucket.mask, device),
    )


def _batch(x: Tensor, rows: Tensor, bucket: Bucket) -> Tensor:
    """[rows, heads, D] -> [B, heads, rows / B, D]."""
    return x.index_select(0, rows).view(bucket.num_sequences, -1, *x.shape[1:]).transpose(1, 2)


def _repeat(x: Tensor, num_heads: int) -> Tensor:
    """[B, K, L, D] -> [B, H, L, D]: each key/value head serves H / K query heads in a row."""
    groups = num_heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
