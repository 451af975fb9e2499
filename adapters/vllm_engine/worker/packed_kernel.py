"""The loop that packs a matrix into blocks of rows, compiled by numba, which vLLM brings."""

from __future__ import annotations

import numba
import numpy as np

_ROWS, _COLUMNS = np.uintp(8), np.uintp(16)
"""Of a piece that is moved at a time: whole vectors of the target, whole cache lines of the source."""


@numba.njit(nogil=True, cache=True)
def write_blocks(source, target):
    """target[b, c, r] = source[b * R + r, c] for R rows a block, a multiple of eight.

    Indices are unsigned: numba would look for negative ones at every step.
    """
    count, columns, rows = np.uintp(target.shape[0]), np.uintp(target.shape[1]), np.uintp(target.shape[2])
    whole = columns - columns % _COLUMNS
    for b in range(count):
        for first in range(np.uintp(0), rows, _ROWS):
            for left in range(np.uintp(0), whole, _COLUMNS):
                for c in range(_COLUMNS):
                    for r in range(_ROWS):
                        target[b, left + c, first + r] = source[b * rows + first + r, left + c]
            for c in range(whole, columns):
                for r in range(_ROWS):
                    target[b, c, first + r] = source[b * rows + first + r, c]
