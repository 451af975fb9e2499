"""Small tensors made on the CPU, moved to where they are used without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device (`x` itself if it is there). From pageable memory CUDA would finish its queue first."""
    if torch.device(device).type == "cuda" and not x.is_cuda and x.numel():
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
