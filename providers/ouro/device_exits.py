"""The exit rule of a decode step on the device: `DepthPlan` for a host that does not wait.

The rule is that of `providers.ouro.trace`, in the same fp32 operations.

Legend: n tokens of the step.
"""

from __future__ import annotations

import numpy as np
import torch

from providers.ouro.trace import DepthPlan


class DeviceExits:
    """
    Attributes:
        deepest: the last loop that a token of the step may run.
        depth: [n] int64 on the device, 0 of a token that has not been decided; after `deepest` all have.

    Args:
        plan: of the step, before its first loop.
        device: where the chances are.
    """

    def __init__(self, plan: DepthPlan, device: torch.device) -> None:
        self.deepest = int(np.where(plan.undecided, plan.high, plan.depth).max())
        whole = torch.from_numpy(np.stack([plan.low, plan.high, plan.delay, plan.depth])).to(device, non_blocking=True)
        self._low, self._high, self._delay, self.depth = whole.unbind(0)
        self._threshold = torch.from_numpy(plan.threshold).to(device, non_blocking=True)
        self._survival = torch.ones_like(self._threshold)
        self._mass = torch.zeros_like(self._threshold)

    def after(self, loop: int, chance: torch.Tensor | None) -> torch.Tensor:
        """Ends a loop -> [n] bool, who goes on.

        Args:
            chance: [n] fp32 to leave after this loop; None where every depth was decided beforehand.
        """
        if chance is not None:
            self._survival, self._mass = self._survival * (1 - chance), self._mass + self._survival * chance
            undecided = self.depth == 0
            fired = undecided & (self._mass >= self._threshold)
            decided = torch.minimum(self._low.clamp(min=loop) + self._delay, self._high)
            exhausted = undecided & ~fired & (self._high <= loop)
            self.depth = torch.where(fired, decided, self.depth).masked_fill(exhausted, loop)
        return (self.depth == 0) | (self.depth > loop)
