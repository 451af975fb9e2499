"""The replay layout, and that an attention kernel needs nothing but q, k, v and the view's documented fields."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.megatron.attention import choose_attention, replay_layout, sdpa_attention
from adapters.megatron.attention_view import AttentionView
from adapters.megatron.varlen import packed_attention, varlen_attention


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


def causal_by_the_book(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """What a kernel for packed causal sequences computes, one sequence at a time; it checks the boundaries too."""
    bounds = cu_seqlens.tolist()
    assert cu_seqlens.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(q) == len(k) == len(v)
    assert longest == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    parts = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        keys, values = (x[a:b].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,lhd->hql", q[a:b], keys) / q.shape[2] ** 0.5
        scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), -torch.inf)
        parts.append(torch.einsum("hql,lhd->qhd", scores.softmax(-1), values))
    return torch.cat(parts)


def packed_by_the_book(q: Tensor, k: Tensor, v: Tensor, view: AttentionView) -> Tensor:
    return packed_attention(q, k, v, view, causal_by_the_book)


DEPTHS = ("full", "fixed", "mixed", "one by one")


def depths_of(kind: str, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Pass counts of 4 as rollouts leave them: everywhere, prompts at 4 and the rest at 2, per token, per sequence."""
    if kind == "full":
        return torch.full((int(lengths.sum()),), 4)
    if kind == "fixed":
        prompts = [int(n) // 3 for n in lengths]
        return torch.cat([torch.tensor([4] * p + [2] * (int(n) - p)) for p, n in zip(prompts, lengths, strict=True)])
    if kind == "one by one":
        return torch.repeat_interleave(torch.arange(len(lengths)) % 4 + 1, lengths)
    return torch.randint(1, 5, (int(lengths.sum()),), generator=generator)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("kind", DEPTHS)
def test_packed_form_equals_the_contract(kind: str, num_kv_heads: int) -> None:
    """Values and gradients of every pass, of sequences of 1 token and more, to fp64 rounding."""
    generator = torch.Generator().manual_seed(DEPTHS.index(kind))
    lengths = torch.tensor([7, 1, 23, 3, 1, 12])
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total, depths = int(lengths.sum()), depths_of(kind, lengths, generator)
    layout = replay_layout(boundaries, depths, max_passes=4, attention=varlen_attention)
    worst = 0.0
    for view in layout.views:
        assert not view.buckets
        shapes = (view.num_queries, 4), (total, num_kv_heads), (total, num_kv_heads)
        inputs = [torch.randn(*shape, 8, dtype=torch.float64, generator=generator) for shape in shapes]
        weights = torch.randn(view.num_queries, 32, dtype=torch.float64, generator=generator)
        results = []
        for attention in (packed_by_the_book, kernel_by_the_book):
            q, k, v = (x.clone().requires_grad_() for x in inputs)
            out = attention(q, k, v, view)
            (out * weights).sum().backward()
            results.append((out, q.grad, k.grad, v.grad))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*results, strict=True)))
    print(f"{kind}: active per pass {layout.num_active}, worst {worst:.1e}")
    assert worst < 1e-12


def test_packed_form_moves_nothing_it_need_not() -> None:
    """Full depth has no gather, a fixed depth reads no row that has left, and gaps end at the last active token."""
    boundaries, prompt = torch.tensor([0, 4, 6]), torch.tensor([4, 4, 2, 2, 4, 2])
    full = replay_layout(boundaries, None, max_passes=4, attention=varlen_attention)
    view = full.views[0].packed
    assert view.keys is view.queries is view.outputs is None and full.views[0] is full.views[3]
    assert view.cu_seqlens.tolist() == [0, 4, 6] and view.longest == 4
    fixed = replay_layout(boundaries, prompt, max_passes=4, attention=varlen_attention)
    assert [v.packed.num_key_rows for v in fixed.views] == [6, 6, 3, 3]
    assert not fixed.is_left_read_after(1) and fixed.views[2].packed.cu_seqlens.tolist() == [0, 2, 3]
    assert fixed.views[2].packed.keys is None and fixed.views[0].packed.keys is not None
    gaps = replay_layout(boundaries, torch.tensor([4, 1, 4, 1, 4, 1]), max_passes=4, attention=varlen_attention)
    assert gaps.views[1].packed.cu_seqlens.tolist() == [0, 3, 4] and gaps.is_left_read_after(0)
    assert gaps.views[1].packed.num_key_rows == 6 and not gaps.is_left_read_after(3)


def test_chosen_kernel() -> None:
    """The flash kernel where it runs: half precision on CUDA."""
    assert choose_attention(torch.bfloat16, torch.device("cuda", 0)) is varlen_attention
    assert choose_attention(torch.float32, torch.device("cuda", 0)) is sdpa_attention
    assert choose_attention(torch.bfloat16, torch.device("cpu")) is sdpa_attention
