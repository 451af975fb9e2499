"""Sums over the tokens of one update, kept on the device, reduced over data-parallel ranks once at the end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from adapters.megatron.grpo import PolicyLoss


class TokenStatistics:
    """Accumulates what each micro-batch's loss says of its tokens.

    Args:
        device: where the sums live, so that no micro-batch waits for the device.
        num_classes: if tokens are also sorted into classes, how many there are.
    """

    _SUMS = ("loss", "num_tokens", "difference", "ratio", "clipped")

    def __init__(self, *, device: torch.device, num_classes: int = 0) -> None:
        self.sums = torch.zeros(len(self._SUMS), dtype=torch.float64, device=device)
        self.class_sums = torch.zeros(2, num_classes, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(1 + num_classes, dtype=torch.float64, device=device)

    def add(self, loss: PolicyLoss, classes: Tensor | None = None) -> None:
        """Adds a micro-batch; `classes` [R] int64 in 0 .. num_classes - 1."""
        apart = loss.difference.double().abs()
        counts = torch.tensor(float(len(apart)), device=apart.device)
        parts = (loss.sum.detach(), counts, apart.sum(), loss.ratio.double().sum(), loss.clipped.sum())
        self.sums += torch.stack([part.double() for part in parts])
        if len(apart):
            self.maxima[0] = torch.maximum(self.maxima[0], apart.max())
        if classes is not None:
            self.class_sums[0].index_add_(0, classes, torch.ones_like(apart))
            self.class_sums[1].index_add_(0, classes, apart)
            self.maxima[1:].scatter_reduce_(0, classes, apart, "amax")

    def problem(self) -> RuntimeError | None:
        """Set when this rank's loss is not a finite number."""
        loss = float(self.sums[0])
        if torch.isfinite(self.sums[0]):
            return None
        return RuntimeError(
            f"the loss is {loss}, expected a finite number: the weights or the rollout's log-probs are broken; nothing "
            "was changed"
        )

    def reduced(self, class_name: str = "class") -> dict[str, float]:
        """The metrics over all data-parallel ranks, equal on each. Every rank must call it."""
        group = parallel_state.get_data_parallel_group()
        for tensor, op in ((self.sums, "SUM"), (self.class_sums, "SUM"), (self.maxima, "MAX")):
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group)
        loss, count, difference, ratio, clipped = self.sums.tolist()
        metrics = {
            "loss": loss / count,
            "logprob_diff_mean": difference / count,
            "logprob_diff_max": float(self.maxima[0]),
            "ratio_mean": ratio / count,
            "clip_fraction": clipped / count,
            "num_tokens": int(count),
        }
        return metrics | self._by_class(class_name)

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
