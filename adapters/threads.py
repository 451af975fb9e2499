"""Loops on a few threads: for compiled passes over memory, which hold no lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 8
"""More of them share the same memory bandwidth."""
WORTH_THREADS = 1 << 22
"""Bytes from which on threads are worth starting."""
Item = TypeVar("Item")
Value = TypeVar("Value")


def available() -> int:
    """How many threads share the work of this process at most."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def spread(function: Callable[[Item], Value], items: Sequence[Item], *, sizes: Sequence[int]) -> list[Value]:
    """`[function(item) for item in items]`, on several threads, which end before it returns.

    Args:
        function: releases the interpreter lock while it works.
        sizes: in bytes, of each item: the largest are begun first, and little work stays on this thread.
    """
    threads = min(available(), len(items))
    if threads <= 1 or sum(sizes) < WORTH_THREADS:
        return [function(item) for item in items]
    order = sorted(range(len(items)), key=lambda i: -sizes[i])
    with ThreadPoolExecutor(threads) as pool:
        futures = {i: pool.submit(function, items[i]) for i in order}
        return [futures[i].result() for i in range(len(items))]
