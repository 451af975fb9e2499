"""Packing, the plan of micro-batches, and what is refused. No model here."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from adapters.megatron.packing import TrainSample, check_samples, pack, plan_microbatches, samples_digest

A = TrainSample(
    prompt_token_ids=[1, 2, 3],
    response_token_ids=[4, 5],
    rollout_logprobs=[-0.5, -0.25],
    advantage=2.0,
    trace=torch.tensor([4, 4, 4, 2]),
    temperature=0.5,
)
B = TrainSample(
    prompt_token_ids=[6], response_token_ids=[7], rollout_logprobs=[-1.0], advantage=-1.0, trace=torch.tensor([4])
)


def test_pack_places_every_row() -> None:
    """Inputs are all tokens but the last; rows point at the positions that predict the response."""
    batch = pack([A, B])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 6]
    assert batch.cu_seqlens.tolist() == [0, 4, 5]
    assert batch.trace is not None and batch.trace.tolist() == [4, 4, 4, 2, 4]
    assert batch.rows.tolist() == [2, 3, 4]
    assert batch.targets.tolist() == [4, 5, 7]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert batch.advantages.tolist() == [2.0, 2.0, -1.0]
    assert batch.temperatures.tolist() == [0.5, 0.5, 1.0]


def test_pack_of_nothing() -> None:
    """A rank without work still has a token to run and no row to score."""
    batch = pack([])
    assert (batch.tokens.tolist(), batch.cu_seqlens.tolist(), batch.trace) == ([0], [0, 1], None)
    assert batch.rows.numel() == batch.targets.numel() == batch.advantages.numel() == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_plan_is_fair_and_complete(num_ranks: int) -> None:
    """Every sample once, no micro-batch over budget, as many micro-batches on every rank, few of them."""
    generator = random.Random(num_ranks)
    for _ in range(50):
        lengths = [generator.randint(1, 60) for _ in range(generator.randint(1, 40))]
        plan = plan_microbatches(lengths, max_tokens=64, num_ranks=num_ranks)
        assert len(plan) == num_ranks and len({len(batches) for batches in plan}) == 1
        assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in batch) <= 64 for batches in plan for batch in batches)
        loads = [sum(lengths[i] for batch in batches for i in batch) for batches in plan]
        assert max(loads) - min(loads) <= max(lengths)
        assert len(plan[0]) <= 2 * max(loads) // 64 + 1


def test_plan_leaves_no_rank_without_a_microbatch() -> None:
    """One sample on two ranks: the other rank runs an empty micro-batch, not none."""
    assert plan_microbatches([5], max_tokens=8, num_ranks=2) == [[[0]], [[]]]


def test_plan_refuses_what_does_not_fit() -> None:
    """A sample longer than the budget is named with the budget that would do."""
    with pytest.raises(ValueError, match=r"tokens_per_microbatch = 8.*\[\(1, 9\)\].*raise it to at least 9"):
        plan_microbatches([3, 9], max_tokens=8, num_ranks=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_token_ids": []}, "sample 1: prompt_token_ids is empty"),
        ({"response_token_ids": []}, "sample 1: response_token_ids is empty"),
        ({"response_token_ids": [4, 99]}, r"sample 1: response_token_ids: got \(position, id\) \(1, 99\)"),
        ({"rollout_logprobs": [-1.0]}, "sample 1: rollout_logprobs: got 1, expected 2"),
        ({"rollout_logprobs": [-1.0, float("nan")]}, r"rollout_logprobs: got \(position, value\) \(1, nan\)"),
        ({"advantage": float("inf")}, "sample 1: advantage: got inf"),
        ({"temperature": 0.0}, "sample 1: temperature: got 0.0"),
        ({"trace": torch.tensor([4, 4])}, "sample 1: trace: got 2 rows, expected 4"),
        ({"trace": None}, "sample 1: has no trace, but others have one"),
        ({"trace": torch.tensor([4, 4, 4, 9])}, "sample 1: trace: nine at 3"),
    ],
)
def test_bad_samples_are_named(changes: dict, words: str) -> None:
    """Each problem names its sample, and the provider's check of the trace is asked."""

    def check_trace(trace: torch.Tensor, num_prompt_tokens: int) -> None:
        if 9 in trace.tolist():
            raise ValueError(f"nine at {trace.tolist().index(9)}")

    check_samples([A, A], vocab_size=10, check_trace=check_trace)
    with pytest.raises(ValueError, match=words):
        check_samples([A, replace(A, **changes)], vocab_size=10, check_trace=check_trace)


def test_scoring_needs_no_rollout_logprobs() -> None:
    """A sample without log-probs can be scored, not trained on; no sample at all is refused."""
    bare = replace(A, rollout_logprobs=())
    check_samples([bare], vocab_size=10, for_training=False)
    with pytest.raises(ValueError, match="rollout_logprobs"):
        check_samples([bare], vocab_size=10)
    with pytest.raises(ValueError, match="no sample"):
        check_samples([], vocab_size=10)


def test_digest_sees_every_field() -> None:
    """Two lists that differ anywhere have different digests; equal ones the same."""
    assert samples_digest([A, B]) == samples_digest([replace(A), B])
    changed = [
        replace(A, prompt_token_ids=[1, 2]),
        replace(A, response_token_ids=[4, 6]),
        replace(A, rollout_logprobs=[-0.5, -0.2]),
        replace(A, advantage=2.5),
        replace(A, temperature=0.6),
        replace(A, trace=torch.tensor([4, 4, 4, 3])),
    ]
    digests = [samples_digest(samples) for samples in ([A, B], [B, A], *([each, B] for each in changed))]
    assert len(set(digests)) == len(digests)
