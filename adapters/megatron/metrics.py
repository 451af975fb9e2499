"""Sums over the trained tokens of one update, kept on the device, reduced over data-parallel ranks once at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from adapters.megatron.grpo import PolicyLoss
from adapters.megatron.runtime import StepRefused

LOSS, COUNT, TOKENS, APART, REPORTED = range(5)
"""Places in the sums: loss, what it is divided by, trained tokens, score differences, then what the loss reports."""


class TokenStatistics:
    """Accumulates what each micro-batch's loss says of its trained tokens.

    Args:
        names: of what the loss reports of each token, the same on every rank.
        device: where the sums live, so that no micro-batch waits for the device.
        num_classes: if tokens are also sorted into classes, how many there are.
    """

    def __init__(self, *, names: Iterable[str], device: torch.device, num_classes: int = 0) -> None:
        self.names = tuple(names)
        self.sums = torch.zeros(REPORTED + len(self.names), dtype=torch.float64, device=device)
        self.class_sums = torch.zeros(2, num_classes, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(1 + num_classes, dtype=torch.float64, device=device)

    def add(self, loss: PolicyLoss, classes: Tensor | None = None) -> None:
        """Adds a micro-batch; `classes` [R] int64 in 0 .. num_classes - 1."""
        mask = loss.mask
        apart = loss.difference.detach().double().abs()[mask]
        parts = [loss.sum.detach(), loss.count, mask.sum(), apart.sum()]
        parts += [self._sum_of(loss, name) for name in self.names]
        self.sums += torch.stack([part.double() for part in parts])
        if len(apart):
            self.maxima[0] = torch.maximum(self.maxima[0], apart.max())
        if classes is not None:
            classes = classes[mask]
            self.class_sums[0].index_add_(0, classes, torch.ones_like(apart))
            self.class_sums[1].index_add_(0, classes, apart)
            self.maxima[1:].scatter_reduce_(0, classes, apart, "amax")

    def merge(self, step: TokenStatistics) -> None:
        """Adds the sums of one optimizer step."""
        self.sums += step.sums
        self.class_sums += step.class_sums
        self.maxima = torch.maximum(self.maxima, step.maxima)

    def problem(self) -> RuntimeError | None:
        """Set when this rank's loss is not a finite number."""
        if torch.isfinite(self.sums[LOSS]):
            return None
        return StepRefused(
            "non_finite",
            f"the loss is {float(self.sums[LOSS])}, expected a finite number: the weights or the rollout's log-probs "
            "are broken; nothing was changed",
        )

    def mean_difference(self) -> float:
        """Mean |old - rollout| over all ranks. Collective."""
        sums = self.sums[[TOKENS, APART]]
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        tokens, apart = sums.tolist()
        return apart / max(tokens, 1)

    def reduced(self, class_name: str = "class") -> dict[str, Any]:
        """The metrics over all data-parallel ranks, equal on each; None where no step was made. Collective."""
        group = parallel_state.get_data_parallel_group()
        for tensor, op in ((self.sums, "SUM"), (self.class_sums, "SUM"), (self.maxima, "MAX")):
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group)
        loss, count, tokens, apart, *reported = self.sums.tolist()
        if not tokens:
            return dict.fromkeys(("loss", "logprob_diff_mean", "logprob_diff_max", *self.names)) | {"num_tokens": 0}
        metrics = {
            "loss": loss / count,
            "logprob_diff_mean": apart / tokens,
            "logprob_diff_max": float(self.maxima[0]),
            **{
                name: total / tokens if math.isfinite(total) else None  # a ratio may overflow where its loss does not
                for name, total in zip(self.names, reported, strict=True)
            },
            "num_tokens": int(tokens),
        }
        return metrics | self._by_class(class_name)

    @staticmethod
    def _sum_of(loss: PolicyLoss, name: str) -> Tensor:
        return loss.reported[name].double()[loss.mask].sum()

    def _by_class(self, name: str) -> dict[str, float]:
        """Per class that has tokens: how many, and their differences. Classes are numbered from 1."""
        metrics: dict[str, float] = {}
        counts, sums = self.class_sums.tolist()
        for index, (count, total) in enumerate(zip(counts, sums, strict=True)):
            if count:
                metrics[f"num_tokens_{name}_{index + 1}"] = int(count)
                metrics[f"logprob_diff_mean_{name}_{index + 1}"] = total / count
                metrics[f"logprob_diff_max_{name}_{index + 1}"] = float(self.maxima[1 + index])
        return metrics


def means(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of an update from those of its steps."""
    if len(metrics) == 1:
        return metrics[0]
    return {name: sum(each[name] for each in metrics) / len(metrics) for name in (metrics or [{}])[0]}
