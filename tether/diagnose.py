"""What replaying the trace is worth: the score difference when the trainer runs responses its own way instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer


def unreplayed_difference(trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Mean and largest |trainer - rollout| log-prob with every token run whole, or routed anew. All ranks together.

    Compare with logprob_diff_mean and _max, where each token ran what it ran in the rollout.
    """
    scores = trainer.score([replace(sample, trace=None) for sample in samples])
    apart = [
        abs(ours - theirs)
        for sample, values in zip(samples, scores, strict=True)
        for ours, theirs in zip(values, sample.rollout_logprobs, strict=True)
    ]
    return {"logprob_diff_unreplayed_mean": fmean(apart), "logprob_diff_unreplayed_max": max(apart)}
