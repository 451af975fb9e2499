"""The replay layout, and that an attention kernel needs nothing but q, k, v and the view's documented fields."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.megatron.attention import AttentionView, replay_layout, sdpa_attention


def kernel_by_the_book(q: Tensor, k: Tensor, v: Tensor, view: AttentionView) -> Tensor:
    """One query at a time, from positions and boundaries alone, as a Triton kernel would be written."""
    rows = []
    for row in range(view.num_queries):
        start = int(view.cu_seqlens[view.query_sequences[row]])
        places = view.key_rows[start : start + int(view.query_positions[row]) + 1]
        per_key = q.shape[1] // k.shape[1]
        keys, values = (x[places].repeat_interleave(per_key, dim=1) for x in (k, v))
        weights = (torch.einsum("hd,lhd->hl", q[row], keys) / q.shape[2] ** 0.5).softmax(-1)
        rows.append(torch.einsum("hl,lhd->hd", weights, values).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("seed", range(6))
def test_dense_buckets_equal_the_contract(seed: int, num_kv_heads: int) -> None:
    """In every pass of random packs the SDPA kernel gives what the view's fields define, to fp64 rounding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (int(torch.randint(1, 7, (1,), generator=generator)),), generator=generator)
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(lengths.sum())
    depths = torch.full((total,), 3) if seed == 0 else torch.randint(1, 5, (total,), generator=generator)
    layout = replay_layout(boundaries, depths, max_passes=4)
    q, k, v = (torch.randn(total, n, 8, dtype=torch.float64, generator=generator) for n in (4, *[num_kv_heads] * 2))
    worst = 0.0
    for view in layout.views:
        active = q[: view.num_queries]
        worst = max(
            worst, float((sdpa_attention(active, k, v, view) - kernel_by_the_book(active, k, v, view)).abs().max())
        )
    print(f"{len(lengths)} sequences, {total} tokens, active per pass {layout.num_active}: {worst:.1e}")
    assert worst < 1e-12


def test_layout_is_sorted_and_counts_every_pass() -> None:
    """Rows are deepest first and in stream order within a depth; a pass runs exactly the tokens that reach it."""
    layout = replay_layout(torch.tensor([0, 3, 5]), torch.tensor([2, 4, 1, 4, 2]), max_passes=4)
    assert layout.order.tolist() == [1, 3, 0, 4, 2]
    assert layout.restore[layout.order].tolist() == [0, 1, 2, 3, 4]
    assert layout.positions.tolist() == [1, 0, 0, 1, 2]
    assert layout.num_active == (5, 4, 2, 2, 0)
    assert [view.num_queries for view in layout.views] == [5, 4, 2, 2] and layout.views[2] is layout.views[3]


def test_passes_that_nobody_reaches_are_not_there() -> None:
    """Uniform depth 2 of 4 has two passes, both plain causal."""
    layout = replay_layout(torch.tensor([0, 4, 7]), torch.full((7,), 2), max_passes=4)
    assert layout.num_active == (7, 7, 0, 0, 0) and len(layout.views) == 2
    assert all(bucket.mask is None for view in layout.views for bucket in view.buckets)
