"""Every loss once more, token by token in fp64, from its paper and not from the project's code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def correction(differences: Sequence[float], kind: str, low: float, high: float) -> list[float]:
    """The weight of each token of one sequence; `differences` are old minus rollout log-probs of its trained tokens."""
    ratios = [math.exp(d) for d in differences]
    whole = math.prod(ratios)
    if kind == "none":
        return [1.0 for _ in ratios]
    if kind == "token_truncate":
        return [min(ratio, high) for ratio in ratios]
    if kind == "sequence_truncate":
        return [min(whole, high) for _ in ratios]
    if kind == "token_mask":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    assert kind == "sequence_mask"
    return [whole if low <= whole <= high else 0.0 for _ in ratios]


def token_loss(ratio: Tensor, own: Tensor, advantage: float, settings: Any) -> Tensor:
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    bounded = min(max(float(ratio.detach()), low), high)
    if settings.loss == "cispo":
        return -bounded * advantage * own
    worst = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if settings.dual_clip and advantage < 0:
        worst = torch.minimum(worst, torch.tensor(-settings.dual_clip * advantage, dtype=torch.float64))
    return worst


def distance(own: Tensor, reference: float, kind: str) -> Tensor:
    if kind == "k1":
        return own - reference
    return (own - reference) ** 2 / 2 if kind == "k2" else (reference - own).exp() - 1 - (reference - own)


def sequence_losses(sample: Any, scores: Sequence[Tensor], settings: Any, entropies: Sequence[Tensor]) -> list[Tensor]:
    """The losses of a sample's trained tokens."""
    trained = [i for i, flag in enumerate(sample.loss_mask or [True] * len(scores)) if flag]
    rollout = [sample.rollout_logprobs[i] for i in trained]
    own = [scores[i] for i in trained]
    old = [sample.old_logprobs[i] for i in trained] if sample.old_logprobs else [float(x.detach()) for x in own]
    if settings.old_policy == "rollout":
        old = rollout
    apart = [a - b for a, b in zip(old, rollout, strict=True)]
    weights = correction(apart, settings.mismatch.correction, settings.mismatch.low, settings.mismatch.high)
    log_ratios = [a - b for a, b in zip(own, old, strict=True)]
    if settings.loss == "gspo" and trained:
        log_ratios = [torch.stack(log_ratios).mean()] * len(trained)
    losses = []
    for place, weight, log_ratio, score in zip(trained, weights, log_ratios, own, strict=True):
        loss = weight * token_loss(log_ratio.exp(), score, sample.advantage, settings)
        if settings.kl_coefficient:
            kl = distance(score, sample.reference_logprobs[place], settings.kl_estimator)
            loss = loss + settings.kl_coefficient * kl
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * entropies[place]
        losses.append(loss)
    return losses


def whole_loss(
    samples: Sequence[Any], scores: Sequence[Sequence[Tensor]], settings: Any, entropies: Any = None
) -> Tensor:
    """The loss of an optimizer step over all its samples."""
    entropies = entropies or [[torch.zeros(())] * len(each) for each in scores]
    losses = [sequence_losses(s, x, settings, h) for s, x, h in zip(samples, scores, entropies, strict=True)]
    zero = torch.zeros((), dtype=torch.float64)
    if settings.normalisation == "token":
        return sum((x for each in losses for x in each), zero) / sum(map(len, losses))
    if settings.normalisation == "sequence":
        counting = [each for each in losses if each]
        return sum((sum(each, zero) / len(each) for each in counting), zero) / len(counting)
    return sum((x for each in losses for x in each), zero) / (len(samples) * settings.constant_tokens)
