"""Samples to train on, packed without padding into micro-batches of a token budget, shared among data-parallel ranks.

A sample of P prompt and n response tokens feeds its first P + n - 1 tokens: the last one is never an input. Its n
scored rows are those that predict the response, positions P - 1 .. P + n - 2.

Legend: T input tokens of a micro-batch, S its sequences, R its scored rows.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TrainSample:
    """One rollout and what is learnt from it. For scoring alone, log-probs and advantage may be left out."""

    prompt_token_ids: Sequence[int]
    response_token_ids: Sequence[int]
    rollout_logprobs: Sequence[float] = ()
    """Of each response token, under the distribution it was drawn from."""
    advantage: float = 0.0
    """Of every response token."""
    loss_mask: Sequence[bool] = ()
    """Which response tokens are trained; empty is all. Tokens that a tool or an environment wrote are not, nor is
    anything of a sample whose mask is all False."""
    old_logprobs: Sequence[float] = ()
    """Of each response token by the trainer before the update's first step; empty: the first step finds them itself."""
    reference_logprobs: Sequence[float] = ()
    """Of each response token by the reference policy; empty without one."""
    trace: Tensor | None = None
    """What each input token really ran, P + n - 1 rows; None is everything."""
    temperature: float = 1.0
    """At which the response was drawn."""

    @property
    def num_scored(self) -> int:
        return len(self.response_token_ids)

    @property
    def mask(self) -> Sequence[bool]:
        """loss_mask, spelled out."""
        return self.loss_mask or [True] * self.num_scored

    @property
    def num_inputs(self) -> int:
        return len(self.prompt_token_ids) + self.num_scored - 1


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch. `cu_seqlens` and `trace` stay on the CPU, where the attention layout is made."""

    tokens: Tensor
    """[T] int64 inputs, sequence by sequence."""
    cu_seqlens: Tensor
    """[S + 1] int64 boundaries."""
    trace: Tensor | None
    """[T, ...] int64 rows, or None when no sample has a trace."""
    rows: Tensor
    """[R] int64 places in the tokens that predict a response token."""
    targets: Tensor
    """[R] int64 response tokens."""
    rollout_logprobs: Tensor
    """[R] fp32."""
    advantages: Tensor
    """[R] fp32."""
    temperatures: Tensor
    """[R] fp32."""
    sequences: Tensor
    """[R] int64 which sequence a row belongs to, 0 .. S - 1."""
    loss_mask: Tensor
    """[R] bool rows that are trained."""
    old_logprobs: Tensor | None = None
    """[R] fp32, or None when the samples have none."""
    reference_logprobs: Tensor | None = None
    """[R] fp32, or None when the samples have none."""

    def to(self, device: torch.device) -> PackedBatch:
        """A copy whose tensors, except boundaries and trace, are on the device."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in moved.keys() - {"cu_seqlens", "trace"}:
            moved[name] = None if moved[name] is None else moved[name].to(device, non_blocking=True)
        return PackedBatch(**moved)


def pack(samples: Sequence[TrainSample]) -> PackedBatch:
    """Packs samples in their order. No sample gives a batch of one token and no scored row, for a rank without work."""
    inputs = [[*sample.prompt_token_ids, *sample.response_token_ids][:-1] for sample in samples] or [[0]]
    starts = torch.tensor([0, *(len(ids) for ids in inputs)]).cumsum(0)
    rows = [
        start + len(sample.prompt_token_ids) - 1 + i
        for start, sample in zip(starts.tolist(), samples, strict=False)
        for i in range(sample.num_scored)
    ]
    traces = [sample.trace for sample in samples if sample.trace is not None]
    return PackedBatch(
        tokens=torch.tensor([token for ids in inputs for token in ids]),
        cu_seqlens=starts,
        trace=torch.cat(traces).to("cpu", torch.int64) if traces else None,
        rows=torch.tensor(rows, dtype=torch.int64),
        targets=torch.tensor([t for s in samples for t in s.response_token_ids], dtype=torch.int64),
        rollout_logprobs=_per_row(samples, lambda s: s.rollout_logprobs or [0.0] * s.num_scored),
        advantages=_per_row(samples, lambda s: [s.advantage] * s.num_scored),
        temperatures=_per_row(samples, lambda s: [s.temperature] * s.num_scored),
        sequences=torch.tensor([i for i, s in enumerate(samples) for _ in range(s.num_scored)], dtype=torch.int64),
        loss_mask=torch.tensor([value for s in samples for value in s.mask], dtype=torch.bool),
        old_logprobs=_if_all(samples, lambda s: s.old_logprobs),
        reference_logprobs=_if_all(samples, lambda s: s.reference_logprobs),
    )


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Who computes what: for each data-parallel rank its micro-batches, each a list of sample indices.

    Every rank gets the same number of micro-batches (some may be empty), because a rank with fewer would leave the
    others waiting. The plan depends on nothing but its arguments, so all ranks make the same one. Longest first, each
    sample goes to the rank with the fewest tokens and there into the first micro-batch with room.

    Raises:
        ValueError: a sample is longer than the budget.
    """
    if too_long := [(i, n) for i, n in enumerate(lengths) if n > max_tokens]:
        raise ValueError(
            f"{len(too_long)} sample(s) do not fit tokens_per_microbatch = {max_tokens}: (sample, tokens) "
            f"{too_long[:10]!r}; raise it to at least {max(lengths)}"
        )
    loads = [0] * num_ranks
    plan: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        _first_fit(plan[rank], index, lengths, max_tokens)
    count = max(1, *(len(batches) for batches in plan))
    return [[sorted(batch) for batch in batches] + [[]] * (count - len(batches)) for batches in plan]


def step_parts(samples: Sequence[TrainSample], *, mini_batches: int, epochs: int) -> list[Sequence[TrainSample]]:
    """The samples of each optimizer step, in their order; parts without a token to train on are left out."""
    bounds = [i * len(samples) // mini_batches for i in range(mini_batches + 1)]
    parts = [samples[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)] if samples else [samples]
    return [part for part in parts if not part or any(map(any, (s.mask for s in part)))] * epochs


def check_samples(
    samples: Sequence[TrainSample],
    *,
    vocab_size: int,
    check_trace: Callable[[Tensor, int], None] = lambda trace, num_prompt_tokens: None,
    for_training: bool = True,
) -> None:
    """Refuses samples that cannot be packed or replayed.

    Args:
        samples: all samples of an update.
        vocab_size: token ids lie below it.
        check_trace: the provider's own check of (trace, num_prompt_tokens), raising ValueError.
        for_training: rollout log-probs are needed.

    Raises:
        ValueError: no sample, or bad ones: names the first ten problems by sample and position.
    """
    if not samples:
        raise ValueError("got no sample, expected at least one")
    traced = [sample.trace is not None for sample in samples]
    problems = [] if len(set(traced)) == 1 else [f"sample {traced.index(False)}: has no trace, but others have one"]
    for index, sample in enumerate(samples):
        problems += [f"sample {index}: {text}" for text in _problems(sample, vocab_size, check_trace, for_training)]
    for name in ("old_logprobs", "reference_logprobs"):
        if lacking := [index for index, sample in enumerate(samples) if not getattr(sample, name)]:
            if len(lacking) < len(samples):
                problems.append(f"sample {lacking[0]}: has no {name}, but others have them")
    if problems:
        raise ValueError(f"{len(problems)} problem(s) with {len(samples)} sample(s): " + "; ".join(problems[:10]))


def samples_digest(samples: Sequence[TrainSample]) -> int:
    """A number in [0, 2**63) over everything in the samples: ranks with different lists would deadlock or diverge."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        for ids in (sample.prompt_token_ids, sample.response_token_ids):
            digest.update(array("q", ids).tobytes() + b"|")
        digest.update(array("d", [*sample.rollout_logprobs, sample.advantage, sample.temperature]).tobytes())
        digest.update(bytes(sample.loss_mask) + b"|" + array("d", sample.old_logprobs).tobytes() + b"|")
        digest.update(array("d", sample.reference_logprobs).tobytes())
        if sample.trace is not None:
            digest.update(sample.trace.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _per_row(samples: Sequence[TrainSample], values: Callable[[TrainSample], Sequence[float]]) -> Tensor:
    return torch.tensor([value for sample in samples for value in values(sample)], dtype=torch.float32)


def _if_all(samples: Sequence[TrainSample], values: Callable[[TrainSample], Sequence[float]]) -> Tensor | None:
    return _per_row(samples, values) if samples and all(values(sample) for sample in samples) else None


def _first_fit(batches: list[list[int]], index: int, lengths: Sequence[int], max_tokens: int) -> None:
    for batch in batches:
        if sum(lengths[i] for i in batch) + lengths[index] <= max_tokens:
            batch.append(index)
            return
    batches.append([index])


def _problems(
    sample: TrainSample, vocab_size: int, check_trace: Callable[[Tensor, int], None], for_training: bool
) -> list[str]:
    problems = []
    for name in ("prompt_token_ids", "response_token_ids"):
        ids = getattr(sample, name)
        if not len(ids):
            problems.append(f"{name} is empty, expected at least one token")
        if outside := [(place, token) for place, token in enumerate(ids) if not 0 <= token < vocab_size]:
            problems.append(f"{name}: got (position, id) {outside[0]!r}, expected ids in [0, {vocab_size})")
    for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "loss_mask"):
        values = getattr(sample, name)
        if len(values) != sample.num_scored and (values or (for_training and name == "rollout_logprobs")):
            problems.append(f"{name}: got {len(values)}, expected {sample.num_scored}")
        if bad := [(place, value) for place, value in enumerate(values) if not math.isfinite(value)]:
            problems.append(f"{name}: got (position, value) {bad[0]!r}, expected finite values")
    if not math.isfinite(sample.advantage):
        problems.append(f"advantage: got {sample.advantage!r}, expected a finite number")
    if not (math.isfinite(sample.temperature) and sample.temperature > 0):
        problems.append(f"temperature: got {sample.temperature!r}, expected > 0")
    return problems + _trace_problems(sample, check_trace)


def _trace_problems(sample: TrainSample, check_trace: Callable[[Tensor, int], None]) -> list[str]:
    if sample.trace is None:
        return []
    if len(sample.trace) != sample.num_inputs:
        return [f"trace: got {len(sample.trace)} rows, expected {sample.num_inputs}, one per input token"]
    try:
        check_trace(sample.trace, len(sample.prompt_token_ids))
    except ValueError as error:
        return [f"trace: {error}"]
    return []
