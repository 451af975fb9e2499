"""From an update's rollouts to what the trainer learns from: reference scores, penalties, advantages, masks.

Every rank does this with the same values; only the reference policy is scored together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from tether.settings import Settings

if TYPE_CHECKING:
    from adapters.megatron.grpo import GrpoSettings
    from adapters.megatron.packing import TrainSample


class Reference(Protocol):
    """The policy that a KL penalty holds on to: `adapters.megatron.reference`, or `tether.reference`."""

    def score(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Its log-probs of every response token, by sample, on every rank. All ranks together."""
        ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What every rank is given of an update's rollouts, one entry a sample."""

    samples: list[TrainSample]
    """Without advantages."""
    groups: list[int]
    rewards: list[float | None]
    """None for a sample whose reward function failed: it is not trained on."""
    truncated: list[bool]


def grpo_settings(s: Settings) -> GrpoSettings:
    """The loss of a run.

    Raises:
        ValueError: choices that do not go together, all in one message.
    """
    from adapters.megatron.grpo import GrpoSettings
    from adapters.megatron.mismatch import MismatchSettings

    return GrpoSettings(
        loss=s.loss,  # type: ignore[arg-type]
        normalisation=s.normalisation,  # type: ignore[arg-type]
        constant_tokens=s.constant_tokens or s.max_new_tokens,
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        dual_clip=s.dual_clip,
        kl_coefficient=s.kl if s.kl_in == "loss" else 0.0,
        kl_estimator=s.kl_estimator,  # type: ignore[arg-type]
        entropy_coefficient=s.entropy_bonus,
        mini_batches=s.mini_batches,
        epochs=s.epochs,
        old_policy=s.old_policy,  # type: ignore[arg-type]
        mismatch=MismatchSettings(correction=s.mismatch, low=s.mismatch_low, high=s.mismatch_high),  # type: ignore[arg-type]
    )


def to_learn(batch: Batch, s: Settings, reference: Reference | None) -> tuple[list[TrainSample], dict[str, Any]]:
    """The samples with advantages, masks and reference log-probs, and the figures of a penalty. Collective."""
    from adapters.megatron.advantages import group_advantages

    samples, rewards, metrics = list(batch.samples), list(batch.rewards), {}
    if reference is not None:
        scores = reference.score(samples)
        samples = [replace(x, reference_logprobs=values) for x, values in zip(samples, scores, strict=True)]
        if s.kl_in == "reward":
            penalties = [response_kl(sample, s.kl_estimator) for sample in samples]
            rewards = [r if r is None else r - s.kl * p for r, p in zip(rewards, penalties, strict=True)]
            metrics["reward_kl_mean"] = fmean(penalties)
    advantages = group_advantages(rewards, batch.groups, estimator=s.advantage)  # type: ignore[arg-type]
    learnt = [
        replace(sample, advantage=advantage, loss_mask=_mask(sample, reward is None or (cut and s.truncated == "mask")))
        for sample, advantage, reward, cut in zip(samples, advantages, rewards, batch.truncated, strict=True)
    ]
    return learnt, metrics


def response_kl(sample: TrainSample, estimator: str) -> float:
    """The estimate of a response's KL to the reference: summed over its trained tokens, under the policy that drew it.

    What is taken from a reward, J. Schulman's estimators as in `adapters.megatron.losses`.
    """
    import torch

    from adapters.megatron.losses import kl_estimate

    drawn, reference = (
        torch.tensor(x, dtype=torch.float64) for x in (sample.rollout_logprobs, sample.reference_logprobs)
    )
    values = kl_estimate(drawn, reference, estimator)  # type: ignore[arg-type]
    return float(values[torch.tensor(list(sample.mask))].sum())


def _mask(sample: TrainSample, leave_out: bool) -> Sequence[bool]:
    return [False] * sample.num_scored if leave_out else sample.loss_mask
