"""The loop that packs a matrix into blocks of rows, compiled by numba, which vLLM brings."""

from __future__ import annotations

import numba


@numba.njit(nogil=True, cache=True)
def write_blocks(source, target):
    """target[b, c, r] = source[b * R + r, c], eight rows at a time."""
    count, columns, rows = target.shape
    for b in range(count):
        for first in range(0, rows, 8):
            for c in range(columns):
                for r in range(8):
                    target[b, c, first + r] = source[b * rows + first + r, c]
