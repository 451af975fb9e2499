"""The policy loss of a micro-batch, put together from `losses` and `mismatch` as the settings say. Pure.

    sum over rows of weight * (rho * policy loss + kl_coefficient * KL - entropy_coefficient * entropy)

to be divided by the global count. rho is the mismatch correction. The old policy, at which the ratio is 1, is the
trainer's own before the update's first step; or, with old_policy "rollout", what the engine reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from adapters.megatron.losses import (
    KlEstimator,
    Loss,
    Normalisation,
    cispo_loss,
    clipped_loss,
    kl_estimate,
    row_weights,
    sequence_log_ratio,
)
from adapters.megatron.mismatch import MismatchSettings, mismatch_weights
from adapters.megatron.packing import PackedBatch

OldPolicy = Literal["trainer", "rollout"]
REPORTED = (
    "ratio_mean",
    "clip_fraction",
    "policy_kl",
    "mismatch_kl",
    "mismatch_weight_mean",
    "mismatch_bound_fraction",
)


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """Which loss is minimised."""

    loss: Loss = "clip"
    normalisation: Normalisation = "token"
    constant_tokens: int = 0
    """Length that the constant normalisation divides by."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """The ratio is clipped at 1 + clip_high from above."""
    dual_clip: float = 0.0
    """Bound of the ratio where the advantage is negative, > 1; 0 is off."""
    kl_coefficient: float = 0.0
    """Weight of the KL estimate towards the reference in the loss; 0 needs no reference."""
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; 0 computes no entropy."""
    mini_batches: int = 1
    """Optimizer steps in one pass over an update's samples, each on a part of them."""
    epochs: int = 1
    """Passes over an update's samples."""
    old_policy: OldPolicy = "trainer"
    mismatch: MismatchSettings = field(default_factory=MismatchSettings)

    def __post_init__(self) -> None:
        if problems := [f"{n}: got {getattr(self, n)!r}, expected {want}" for n, (ok, want) in self._rules() if not ok]:
            raise ValueError("GrpoSettings " + "; ".join(problems))

    @property
    def reported(self) -> tuple[str, ...]:
        """What `policy_loss` reports of each token."""
        reference = ("reference_kl",) if self.kl_coefficient else ()
        return (*REPORTED, *reference, *(("entropy",) if self.entropy_coefficient else ()))

    def _rules(self) -> list[tuple[str, tuple[bool, str]]]:
        def known(kind: object, value: str) -> tuple[bool, str]:
            return value in get_args(kind), f"one of {', '.join(get_args(kind))}"

        by_sequence = self.loss != "gspo" or self.normalisation == "sequence"
        corrected_once = self.old_policy == "trainer" or self.mismatch.correction == "none"
        has_gradient = self.kl_estimator != "k1" or not self.kl_coefficient
        return [
            ("loss", known(Loss, self.loss)),
            ("normalisation", known(Normalisation, self.normalisation)),
            ("normalisation", (by_sequence, "sequence, because gspo's ratio is one of whole sequences")),
            ("constant_tokens", (self.normalisation != "constant" or self.constant_tokens >= 1, ">= 1, the length")),
            ("clip_low", (0 < self.clip_low <= 1, "in (0, 1]")),
            ("clip_high", (0 < self.clip_high < math.inf, "> 0")),
            ("dual_clip", (self.dual_clip == 0 or 1 < self.dual_clip < math.inf, "0 (off) or > 1")),
            ("dual_clip", (self.dual_clip == 0 or self.loss != "cispo", "0: cispo has no clipped objective")),
            ("kl_coefficient", (0 <= self.kl_coefficient < math.inf, "a finite number >= 0")),
            ("kl_estimator", known(KlEstimator, self.kl_estimator)),
            ("kl_estimator", (has_gradient, "k2 or k3 in the loss: the gradient of k1 has the mean 0")),
            ("entropy_coefficient", (0 <= self.entropy_coefficient < math.inf, "a finite number >= 0")),
            ("mini_batches", (self.mini_batches >= 1, ">= 1")),
            ("epochs", (self.epochs >= 1, ">= 1")),
            ("old_policy", known(OldPolicy, self.old_policy)),
            ("old_policy", (corrected_once, "trainer with a mismatch correction: the ratio has it in already")),
        ]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a micro-batch, and what is reported of its rows."""

    sum: Tensor
    """[] fp32, with gradient: to be divided by the global count."""
    count: Tensor
    """[] int: this micro-batch's part of the global count."""
    mask: Tensor
    """[R] bool: rows that are trained. Only they are reported."""
    difference: Tensor
    """[R]: old (with old_policy rollout: trainer) minus rollout log-prob."""
    reported: dict[str, Tensor]
    """[R] each: metrics to be averaged over the trained rows of the update."""


def policy_loss(scores: Tensor, batch: PackedBatch, settings: GrpoSettings) -> PolicyLoss:
    """The loss of a micro-batch.

    Args:
        scores: [R] the trainer's log-probs, or with an entropy bonus [2, R]: log-probs and entropies; with gradient.
        batch: advantages, masks and the other log-probs of the same rows. Without old log-probs the trainer's own
            are the old ones: right for the first step of an update.
    """
    trainer, entropy = (scores, None) if scores.dim() == 1 else scores
    rollout, sequences, mask = batch.rollout_logprobs, batch.sequences, batch.loss_mask
    if settings.old_policy == "rollout":
        old, apart = rollout, (trainer - rollout).detach()
    else:
        old = trainer.detach() if batch.old_logprobs is None else batch.old_logprobs
        apart = old - rollout
    weights, bound = mismatch_weights(apart, mask, sequences, settings.mismatch)
    log_ratio = trainer - old
    loss, clipped = _policy_part(log_ratio, trainer, batch, settings)
    total = weights * loss
    reported = {
        "ratio_mean": log_ratio.detach().exp(),
        "clip_fraction": clipped,
        "policy_kl": kl_estimate(old, trainer.detach(), "k3"),
        "mismatch_kl": torch.expm1(apart) - apart,
        "mismatch_weight_mean": weights,
        "mismatch_bound_fraction": bound,
    }
    if settings.kl_coefficient:
        reference = trainer.detach() if batch.reference_logprobs is None else batch.reference_logprobs  # no row at all
        distance = kl_estimate(trainer, reference, settings.kl_estimator)
        total = total + settings.kl_coefficient * distance
        reported["reference_kl"] = distance.detach()
    if entropy is not None:
        total = total - settings.entropy_coefficient * entropy
        reported["entropy"] = entropy.detach()
    row, count = row_weights(
        mask, sequences, normalisation=settings.normalisation, constant_tokens=settings.constant_tokens
    )
    return PolicyLoss(
        # where, not a product alone: a masked row may hold anything, infinite times 0 is not 0
        sum=(row * torch.where(mask, total, 0)).sum(),
        count=count,
        mask=mask,
        difference=apart,
        reported=reported,
    )


def _policy_part(
    log_ratio: Tensor, trainer: Tensor, batch: PackedBatch, settings: GrpoSettings
) -> tuple[Tensor, Tensor]:
    low, high = settings.clip_low, settings.clip_high
    if settings.loss == "cispo":
        return cispo_loss(log_ratio, trainer, batch.advantages, low=low, high=high)
    if settings.loss == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, batch.loss_mask, batch.sequences)
    return clipped_loss(log_ratio, batch.advantages, low=low, high=high, dual_clip=settings.dual_clip)
