"""Why an optimizer step is not made: what is checked between the backward pass and the step, on reduced values.

Every check is collective and comes to the same end on every rank: either all step or all raise `StepRefused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from adapters.megatron.metrics import TokenStatistics
from adapters.megatron.runtime import StepRefused, raise_together

KINDS = ("non_finite", "grad_norm", "score_difference", "router")
"""What a step can be refused for."""


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What a step may not exceed. Not-a-number anywhere is always refused."""

    grad_norm: float | None = None
    """Largest gradient norm before clipping; None for any."""
    score_difference: float | None = None
    """Largest mean |old - rollout| log-prob of the step's tokens; None for any."""
    skip: frozenset[str] = frozenset()
    """Refusals that skip the step; the others end the update with an error."""


def check_global_count(num_tokens: Tensor | None, expected: int) -> None:
    """Raises RuntimeError on every rank if the micro-batches' counts do not add up to that of the samples."""
    assert num_tokens is not None
    total = num_tokens.clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    if int(total) != expected:
        raise RuntimeError(
            f"the loss would be divided by {int(total)}, but the samples of this step count {expected}: a micro-batch "
            "is missing, double or wrongly masked; nothing was changed"
        )


def refuse_score_difference(statistics: TokenStatistics, limits: StepLimits) -> None:
    """Raises StepRefused if trainer and engine differ too much."""
    if limits.score_difference is None:
        return
    mean = statistics.mean_difference()
    if mean > limits.score_difference:
        raise StepRefused(
            "score_difference",
            f"trainer and engine differ by {mean:.3g} in the mean log-prob, expected at most "
            f"{limits.score_difference:.3g}: the engine serves other weights, a trace is not replayed, or precision is "
            "lost; the step was not made",
        )


def refuse_non_finite_gradients(model: nn.Module, ddp: Any) -> None:
    """Raises StepRefused, naming parameters."""
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    error = None
    if not all(torch.isfinite(torch.stack(torch.aminmax(buffer.grad_data))).all() for buffer in buffers):
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        broken = [name for name, parameter in trained if not torch.isfinite(parameter.main_grad).all()]
        error = StepRefused(
            "non_finite",
            f"{len(broken)} gradient(s) are not finite: {broken[:10]}; nothing was changed. Look at the rollouts of "
            "this update",
        )
    raise_together(error)


def refuse_grad_norm(optimizer: Any, limits: StepLimits) -> None:
    """Raises StepRefused if the norm of the gradients is a spike."""
    if limits.grad_norm is None:
        return
    optimizer.prepare_grads()  # `step` does it again; it only copies
    norm = float(optimizer.get_grad_norm())
    if norm > limits.grad_norm:
        raise StepRefused(
            "grad_norm",
            f"the gradient norm is {norm:.4g}, expected at most {limits.grad_norm:.4g} after those of the updates "
            "before; the step was not made",
        )


def counted(refused: list[StepRefused]) -> Mapping[str, int]:
    """Metrics of the refusals of one update: how many steps were skipped, and how many of them for what."""
    kinds = {f"skipped_{kind}": sum(error.kind == kind for error in refused) for kind in KINDS}
    return {"skipped_steps": len(refused), **{name: count for name, count in kinds.items() if count}}
