"""The engine that drew a token and the trainer do not give it quite the same probability. What is done about that.

With rho = exp(old - rollout) of each token (old: the trainer's log-prob before the update's first step):

    none               1
    token_truncate     min(rho, high)                                  truncated importance sampling: Yao et al. 2025,
                                                                       "Your efficient RL framework secretly brings you
                                                                       off-policy RL training"
    sequence_truncate  min(product of rho over the sequence, high)     the same of whole sequences
    token_mask         rho if low <= rho <= high, else 0               IcePop: Ring-1T, arXiv:2510.18855, section 3
    sequence_mask      product of rho if within [low, high], else 0    Liu et al. 2025, "When speed kills stability"

The weight multiplies the policy loss of a token and has no gradient. A masked token still counts in the normaliser.
Pure functions over packed rows. Legend: R scored rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Correction = Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class MismatchSettings:
    """Which correction, and its bounds."""

    correction: Correction = "token_truncate"
    low: float = 0.5
    """Least ratio that a mask keeps."""
    high: float = 2.0
    """Largest weight of a truncation; largest ratio that a mask keeps."""

    def __post_init__(self) -> None:
        rules = {
            "correction": (self.correction in get_args(Correction), f"one of {', '.join(get_args(Correction))}"),
            "low": (0 <= self.low <= 1, "in [0, 1]"),
            "high": (1 <= self.high < math.inf, ">= 1"),
        }
        if bad := [f"{n}: got {getattr(self, n)!r}, expected {want}" for n, (ok, want) in rules.items() if not ok]:
            raise ValueError("MismatchSettings " + "; ".join(bad))


def mismatch_weights(
    difference: Tensor, mask: Tensor, sequences: Tensor, settings: MismatchSettings
) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether the correction bound it.

    Args:
        difference: [R] old minus rollout log-probs.
        mask: [R] bool, tokens that are trained; the others are no part of a sequence's product.
        sequences: [R] int64, the sequence of each row, 0 .. S - 1.

    Returns:
        ([R] weights without gradient, [R] bool: truncated or masked).
    """
    difference = difference.detach()
    if settings.correction == "none":
        return torch.ones_like(difference), torch.zeros_like(mask)
    if settings.correction.startswith("sequence"):
        difference = sequence_sums(torch.where(mask, difference, 0), sequences)[sequences]
    ratio = difference.exp()
    if settings.correction.endswith("truncate"):
        return ratio.clamp(max=settings.high), ratio > settings.high
    outside = (ratio < settings.low) | (ratio > settings.high)
    return torch.where(outside, 0, ratio), outside


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """[S] sums of [R] values over each sequence, with gradient."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)
