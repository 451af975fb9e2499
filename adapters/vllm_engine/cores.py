"""Every core for a moment, in a process that computes with few."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def every_core() -> Iterator[None]:
    """For copying, packing and reading back, which only move elements: threads change nothing but the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
