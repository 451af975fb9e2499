"""The parts of a policy loss: what is lost at each token, how losses are averaged, distances to a reference. Pure.

With r = exp(trainer - old) of a token and A its advantage:

    clip   - min(r A, clip(r, 1 - low, 1 + high) A)         PPO, arXiv:1707.06347; low and high apart: DAPO,
                                                            arXiv:2503.14476. With A < 0 and dual_clip = c > 1 the loss
                                                            is at most - c A: arXiv:1912.09729
    gspo   the same with r = exp(mean over the sequence's   GSPO, arXiv:2507.18071, equations 5 and 7
           tokens of trainer - old)
    cispo  - stop_gradient(clip(r)) A trainer               CISPO, MiniMax-M1, arXiv:2506.13585, equations 4 and 5

    token     sum over all tokens / their number            DAPO, arXiv:2503.14476
    sequence  mean over sequences of the mean over tokens   GRPO, arXiv:2402.03300
    constant  sum / (sequences * length)                    Dr. GRPO, arXiv:2503.20783

    k1 = x, k2 = x**2 / 2, k3 = exp(-x) - 1 + x of x = policy - reference: estimators of KL(policy || reference) from
    tokens drawn by the policy (J. Schulman 2020, "Approximating KL divergence").

Legend: R scored rows, S sequences; a mask is [R] bool, rows that count; sequences is [R] int64 in 0 .. S - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from adapters.megatron.mismatch import sequence_sums

Loss = Literal["clip", "gspo", "cispo"]
Normalisation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """[R] the mean log-ratio of each row's sequence over its rows that count."""
    counts = sequence_sums(mask.to(log_ratio.dtype), sequences).clamp(min=1)
    return (sequence_sums(torch.where(mask, log_ratio, 0), sequences) / counts)[sequences]


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """([R] loss, [R] bool: a clip took the gradient away). dual_clip 0 is off."""
    ratio = log_ratio.exp()
    gain, bounded_gain = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    loss, clipped = -torch.minimum(gain, bounded_gain), bounded_gain < gain
    if dual_clip:
        ceiling = -dual_clip * advantages
        too_much = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(too_much, ceiling, loss), clipped | too_much
    return loss, clipped.detach()


def cispo_loss(
    log_ratio: Tensor, trainer_logprobs: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """([R] loss, [R] bool: the weight was clipped). A clipped token keeps its gradient, with the bounded weight."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * trainer_logprobs, weight != ratio


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """[R] what each token adds to the estimate; gradient flows through the policy's log-probs."""
    x = policy_logprobs - reference_logprobs
    if estimator == "k1":
        return x
    return x**2 / 2 if estimator == "k2" else torch.expm1(-x) + x


def row_weights(
    mask: Tensor, sequences: Tensor, *, normalisation: Normalisation, constant_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """How a micro-batch's rows add to the loss: sum(weights * losses), to be divided by the global count.

    A sequence lies in one micro-batch as a whole, so nothing here depends on the cut.

    Returns:
        ([R] fp32 weights, 0 where the mask is; [] int count: of tokens, or of sequences).
    """
    ones = mask.float()
    if normalisation == "token":
        return ones, mask.sum().int()
    tokens = sequence_sums(ones, sequences)
    if normalisation == "sequence":
        return ones / tokens.clamp(min=1)[sequences], (tokens > 0).sum().int()
    return ones / constant_tokens, torch.tensor(len(tokens), dtype=torch.int, device=mask.device)


def global_count(masks: Sequence[Sequence[bool]], normalisation: Normalisation) -> int:
    """What the counts of all micro-batches and ranks must add up to, from every sample's mask."""
    if normalisation == "token":
        return sum(map(sum, masks))
    return sum(map(any, masks)) if normalisation == "sequence" else len(masks)
