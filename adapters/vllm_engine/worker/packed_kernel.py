"""The loops that pack a matrix into blocks of rows, compiled by numba, which vLLM brings."""

from __future__ import annotations

import numba
import numpy as np

from adapters.vector_memory import LINE, finish_lines, store_line, transpose_8x8

_SIDE, _EIGHT = np.uintp(16), np.uintp(8)
"""Rows and columns of a piece that is moved at a time: whole cache lines of source and target, few streams of reads."""
_WORD, _LINE = np.uintp(4), np.uintp(LINE)


def write_blocks(source: np.ndarray, target: np.ndarray) -> None:
    """target[b, c, r] = source[b * R + r, c] for R rows a block, a multiple of eight. Both contiguous, of one dtype."""
    in_lines = target.itemsize == _WORD and target.shape[2] % _SIDE == 0 and target.ctypes.data % LINE == 0
    (_write_lines if in_lines else _write_elements)(source, target)


@numba.njit(nogil=True, cache=True)
def _write_lines(source, target):
    """Each piece is transposed in the cache and leaves it in whole lines.

    Indices are unsigned: numba would look for negative ones at every step.
    """
    count, columns, rows = np.uintp(target.shape[0]), np.uintp(target.shape[1]), np.uintp(target.shape[2])
    piece = np.empty((_SIDE, _SIDE), np.uint32)
    whole = columns - columns % _SIDE
    at, to = np.uintp(source.ctypes.data), np.uintp(target.ctypes.data)
    at_row, to_row = columns * _WORD, rows * _WORD
    for b in range(count):
        for first in range(np.uintp(0), rows, _SIDE):
            for left in range(np.uintp(0), whole, _SIDE):
                between = np.uintp(piece.ctypes.data)
                for r in range(np.uintp(0), _SIDE, _EIGHT):
                    for c in range(np.uintp(0), _SIDE, _EIGHT):
                        tile = at + (b * rows + first + r) * at_row + (left + c) * _WORD
                        transpose_8x8(between + c * _LINE + r * _WORD, _LINE, tile, at_row)
                for c in range(_SIDE):
                    store_line(to + (b * columns + left + c) * to_row + first * _WORD, between + c * _LINE)
            for c in range(whole, columns):
                for r in range(first, first + _SIDE):
                    target[b, c, r] = source[b * rows + r, c]
    finish_lines()


@numba.njit(nogil=True, cache=True)
def _write_elements(source, target):
    """Eight rows at a time, and whole cache lines of them."""
    count, columns, rows = np.uintp(target.shape[0]), np.uintp(target.shape[1]), np.uintp(target.shape[2])
    whole = columns - columns % _SIDE
    for b in range(count):
        for first in range(np.uintp(0), rows, _EIGHT):
            for left in range(np.uintp(0), whole, _SIDE):
                for c in range(_SIDE):
                    for r in range(_EIGHT):
                        target[b, left + c, first + r] = source[b * rows + first + r, left + c]
            for c in range(whole, columns):
                for r in range(_EIGHT):
                    target[b, c, first + r] = source[b * rows + first + r, c]
