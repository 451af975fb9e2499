"""Values on their way from the device, so that nobody waits for them before they are needed."""

from __future__ import annotations

import numpy as np
import torch


class Later:
    """A tensor's values on the host, once the device has come that far.

    Args:
        values: integers that fit a byte. The copy is queued now, behind what computes them.
    """

    def __init__(self, values: torch.Tensor) -> None:
        narrow = values.to(torch.uint8)
        self._event: torch.cuda.Event | None = None
        if narrow.is_cuda:
            self._host = torch.empty(narrow.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(narrow, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = narrow

    @property
    def is_here(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> np.ndarray:
        """The values; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
