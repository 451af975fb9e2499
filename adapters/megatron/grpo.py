"""GRPO's two formulas: advantages within a group, and the clipped policy loss. Pure functions.

Source: DeepSeekMath (arXiv:2402.03300), with the asymmetric clip of DAPO (arXiv:2503.14476). The old policy is the one
that drew the rollout, with the log-probs that the engine reported.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """The clip range of the policy ratio."""

    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """The ratio is clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and 0 < self.clip_high < math.inf):
            raise ValueError(
                f"clip range: got clip_low={self.clip_low!r}, clip_high={self.clip_high!r}, "
                "expected 0 < clip_low <= 1 and 0 < clip_high"
            )


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of some tokens, and what is reported of each."""

    sum: Tensor
    """[] fp32, with gradient: the sum, to be divided by the global token count."""
    difference: Tensor
    """[R] fp32: trainer minus rollout log-prob."""
    ratio: Tensor
    """[R] fp32: exp(difference)."""
    clipped: Tensor
    """[R] bool: the clip took the gradient away."""


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, normalise_std: bool = True
) -> list[float]:
    """Rewards relative to their group: minus its mean and, if asked, divided by its sample standard deviation.

    A group of one, or one whose rewards are all equal, gets 0: it says nothing about which response is better.

    Raises:
        ValueError: another number of groups than of rewards, or a reward that is not finite.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"got {len(rewards)} rewards and {len(groups)} group ids, expected as many")
    if bad := [(i, r) for i, r in enumerate(rewards) if not math.isfinite(r)]:
        raise ValueError(f"rewards: got (sample, reward) {bad[:10]!r}, expected finite numbers")
    members: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(float(reward))
    scales = {group: _centre_and_scale(values, normalise_std) for group, values in members.items()}
    return [(reward - scales[g][0]) * scales[g][1] for reward, g in zip(rewards, groups, strict=True)]


def policy_loss(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, settings: GrpoSettings
) -> PolicyLoss:
    """- min(ratio * advantage, clip(ratio) * advantage), with ratio = exp(trainer - rollout), summed over tokens.

    All inputs are [R] fp32; gradient flows through `trainer_logprobs`.
    """
    difference = trainer_logprobs - rollout_logprobs
    ratio = difference.exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    return PolicyLoss(
        sum=-torch.minimum(gain, bounded_gain).sum(),
        difference=difference.detach(),
        ratio=ratio.detach(),
        clipped=(bounded_gain < gain).detach(),
    )


def _centre_and_scale(values: list[float], normalise_std: bool) -> tuple[float, float]:
    """(mean, factor) of one group; factor 0 when all values are equal."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    if not normalise_std:
        return mean, 1.0
    return mean, 1 / math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
