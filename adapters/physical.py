"""What a stored tensor is: the row type of every provider's table of physical tensors. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PhysicalTensor:
    """One tensor as a checkpoint stores it. "Physical": a layer that runs four times is stored once."""

    shape: tuple[int, ...]
    """Its global shape."""
    partition_dim: int | None = None
    """The dimension that tensor parallelism cuts; None when every rank holds the whole tensor."""
    frozen: bool = False
    """Not trained by default."""
