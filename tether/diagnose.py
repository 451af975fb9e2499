"""What replaying the trace is worth: the score difference when responses are replayed at full depth instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer


def full_depth_difference(trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Mean and largest |trainer - rollout| log-prob with every token run through all loops. All ranks together.

    Compare with logprob_diff_mean and _max, where each token ran what it ran in the rollout; equal at full depth.
    """
    scores = trainer.score([replace(sample, trace=None) for sample in samples])
    apart = [
        abs(ours - theirs)
        for sample, values in zip(samples, scores, strict=True)
        for ours, theirs in zip(values, sample.rollout_logprobs, strict=True)
    ]
    return {"logprob_diff_full_depth_mean": fmean(apart), "logprob_diff_full_depth_max": max(apart)}
