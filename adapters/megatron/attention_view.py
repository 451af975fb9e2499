"""What one pass's attention reads, in the forms that the kernels take. The kernels are in `attention` and `varlen`.

Legend: T packed tokens (stream order: sequence by sequence), N active rows of a pass, S sequences, H heads, K key/value
heads, D head width; in a bucket B sequences, Q queries and L keys of each, both padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from adapters.megatron.gather import Gather


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Sequences of similar length as one dense batch."""

    num_sequences: int
    query_rows: Tensor
    """[B * Q] int64 sorted rows; padding repeats a row and is never read."""
    key_rows: Tensor
    """[B * L] int64 sorted rows; padding repeats a row and is masked or, under a causal mask, never reached."""
    mask: Tensor | None
    """[B, 1, Q, L] bool, True where a query may look; None when every token is active: plain causal."""


@dataclass(frozen=True, kw_only=True)
class PackedPass:
    """One pass's queries and keys at their places in the stream."""

    cu_seqlens: Tensor
    """[S + 1] int32 boundaries of the places."""
    longest: int
    """Places of the longest sequence."""
    num_key_rows: int
    """Keys are looked for in the first of the sorted rows, this many."""
    keys: Gather | None
    """Sorted rows -> places; None where the rows stand in stream order. The next two are None with it."""
    queries: Gather | None
    """Active rows -> places; at a place whose token has left the query is zero."""
    outputs: Gather | None
    """Places -> active rows."""


@dataclass(frozen=True, kw_only=True)
class AttentionView:
    """One pass's queries and keys. A kernel needs only this and q, k, v.

    Query row i (of N, in sorted order) is the token at `query_positions[i]` of sequence s = `query_sequences[i]`. It
    attends to stream places cu_seqlens[s] .. cu_seqlens[s] + position; k and v hold a place in row `key_rows[place]`.
    """

    num_queries: int
    query_sequences: Tensor
    """[N] int64."""
    query_positions: Tensor
    """[N] int64, from 0 in each sequence."""
    cu_seqlens: Tensor
    """[S + 1] int64, ascending boundaries in the stream."""
    key_rows: Tensor
    """[T] int64: stream place -> sorted row."""
    num_key_rows: int
    """The kernel reads the first of the sorted rows' keys and values, this many; N where only active tokens are seen
    and the kernel's form says so, else T."""
    buckets: tuple[Bucket, ...]
    """The same, as dense batches for `sdpa_attention`; empty for another kernel."""
    bucket_places: Tensor
    """[N] int64: query row -> its place in the buckets' concatenated output; empty without buckets."""
    packed: PackedPass | None
    """The same, as one packed causal batch for `varlen_attention`; None for another kernel."""


Attention = Callable[[Tensor, Tensor, Tensor, AttentionView], Tensor]
"""(q [N, H, D], k [T, K, D], v [T, K, D], view) -> [N, H * D]; k and v in sorted row order, all sequences causal.

k and v have at least the `view.num_key_rows` rows that are read."""
