"""Rewards of groups of samples -> one advantage a sample. Pure functions in fp64.

    grpo     (r - mean) / std of the group         DeepSeekMath, arXiv:2402.03300, section 4.1.2
    centred  r - mean of the group                 Dr. GRPO, arXiv:2503.20783, section 3.2: no division by std
    rloo     r - mean of the group's others        REINFORCE leave-one-out, arXiv:2402.14740, equation 7

A sample without a reward (None) gets 0 and does not count in its group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

Estimator = Literal["grpo", "centred", "rloo"]


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, estimator: Estimator = "grpo"
) -> list[float]:
    """Each reward relative to its group.

    A group of one, or one whose rewards are all equal, gets 0: it says nothing about which response is better. The
    standard deviation is the sample's (divided by n - 1).

    Raises:
        ValueError: another number of groups than of rewards, a reward that is not finite, or an unknown estimator.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"advantage: got {estimator!r}, expected one of {', '.join(get_args(Estimator))}")
    if len(rewards) != len(groups):
        raise ValueError(f"got {len(rewards)} rewards and {len(groups)} group ids, expected as many")
    if bad := [(i, r) for i, r in enumerate(rewards) if r is not None and not math.isfinite(r)]:
        raise ValueError(f"rewards: got (sample, reward) {bad[:10]!r}, expected finite numbers")
    members = by_group(rewards, groups)
    scales = {group: _centre_and_scale(values, estimator) for group, values in members.items()}
    return [
        0.0 if reward is None else (reward - scales[g][0]) * scales[g][1]
        for reward, g in zip(rewards, groups, strict=True)
    ]


def by_group(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> dict[Hashable, list[float]]:
    """The rewards there are, by group; a group without any has an empty list."""
    members: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).extend([] if reward is None else [float(reward)])
    return members


def says_nothing(rewards: Sequence[float]) -> bool:
    """Whether every advantage of a group with these rewards is 0."""
    return len(rewards) < 2 or min(rewards) == max(rewards)


def _centre_and_scale(values: list[float], estimator: Estimator) -> tuple[float, float]:
    """(mean, factor) of one group; factor 0 when its rewards say nothing."""
    if says_nothing(values):
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    if estimator == "centred":
        return mean, 1.0
    if estimator == "rloo":  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        return mean, len(values) / (len(values) - 1)
    return mean, 1 / math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
