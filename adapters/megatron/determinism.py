"""How strictly torch keeps the order of sums, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

OFF, WARNS, STRICT = 0, 1, 2
"""torch's modes of determinism."""


@contextmanager
def strictly() -> Iterator[None]:
    """Where an operation without a fixed order only warns: such operators keep one, if they can, or raise."""
    now = torch.get_deterministic_debug_mode()
    with _mode(STRICT if now == WARNS else now):
        yield


@contextmanager
def not_needed() -> Iterator[None]:
    """For operations whose results depend on no order, as writes to places of which each is written once.

    The deterministic forms of some sort what they write, which takes several times as long.
    """
    with _mode(OFF):
        yield


@contextmanager
def _mode(mode: int) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
