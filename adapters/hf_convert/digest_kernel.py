"""The digest's inner loops for CPU, compiled by numba. `digest.py` is their reference.

A tile's u and v are kept apart from its products: arithmetic of 32 bits fills the vector registers only in a loop that
has nothing wider, and a pair of products is then one word of 64 bits and its upper half.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from adapters.hf_convert.digest_constants import HIGH, MULTIPLIERS, ODD, PLACE
from adapters.vector_memory import LINE, finish_lines, store_line

TILE = 256
"""Words that are mixed before their products are summed: few, so that memory is read on while they are."""
_FIRST, _SECOND = np.uint32(MULTIPLIERS[0]), np.uint32(MULTIPLIERS[1])
_PLACE, _TWICE_ODD, _TWICE_HIGH = np.uint32(PLACE), np.uint32(2 * ODD % 2**32), np.uint32(2 * HIGH % 2**32)
_ONE, _15, _16 = np.uint32(1), np.uint32(15), np.uint32(16)
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_LINE = np.uintp(LINE)


def sum_of_products(
    words: torch.Tensor, *, first: int, stride: int = 0, rows: int = 1, columns: int = 0, exponent: int = 0
) -> tuple[int, bool]:
    """Sum of u * v mod 2**64 over words that lie in rows, or in blocks of rows.

    Args:
        words: [A, N] contiguous signed integers of 1, 2 or 4 bytes, on CPU. `words[a, c * rows + r]` is at place
            `first + a * stride + c + r * columns + 1`.
        rows: divides N, at most `TILE`. If it is not 1, all places are of one high half.
        exponent: the bits that are all set in infinities and NaNs.

    Returns:
        The sum, and whether no word has all bits of `exponent`.
    """
    array = words.numpy()
    magnitude = np.int32(2 ** (8 * array.dtype.itemsize - 1) - 1)
    places = np.uint64(first + 1), np.uint64(stride)
    total, peak = _sum(array, None, *places, np.int64(rows), _steps(rows, columns), magnitude if exponent else None)
    return int(total), not exponent or int(peak) < exponent


def copy_sum_of_products(source: torch.Tensor, target: torch.Tensor) -> int:
    """Copies [n] signed integers of 2 or 4 bytes; the least one, which is a negative zero's bits, as 0.

    Returns:
        Sum of u * v mod 2**64 of what was written, from place 1.
    """
    array = source.numpy()
    arrays = array[None], target.numpy()[None]
    return int(_sum(*arrays, np.uint64(1), np.uint64(0), np.int64(1), _steps(1, 0), None)[0])


@functools.lru_cache(maxsize=32)
def _steps(rows: int, columns: int) -> np.ndarray:
    """[2 * TILE] uint32: from the first word of a tile to the others, n * PLACE, then 2 * n * ODD."""
    column, row = np.divmod(np.arange(TILE, dtype=np.uint64), np.uint64(rows))
    places = (column + row * np.uint64(columns)).astype(np.uint32)
    return np.concatenate([places * _PLACE, places * _TWICE_ODD])


@numba.njit(inline="always")
def _mix(z):
    z ^= z >> _16
    z = np.uint32(z * _FIRST)
    z ^= z >> _15
    z = np.uint32(z * _SECOND)
    return np.uint32(z ^ (z >> _15))


@numba.njit(inline="always")
def _add_products(pairs, count):
    """`pairs` holds TILE words u, two in one of 64 bits, and TILE words v."""
    total = np.uint64(0)
    for j in range(count):
        u, v = pairs[j], pairs[TILE // 2 + j]
        total += (u & _LOW) * (v & _LOW) + (u >> _HALF) * (v >> _HALF)
    return total


@numba.njit(inline="always")
def _store(words, target, row, begin, count):
    """The first words to a place in a row, past the cache if that is whole lines: nobody reads them soon.

    Takes no slices: numba counts their references by locked instructions, which wait for every line.
    """
    size = np.uintp(count * words.itemsize)
    at = np.uintp(words.ctypes.data)
    to = np.uintp(target.ctypes.data + (row * target.shape[1] + begin) * words.itemsize)
    if to % _LINE or size % _LINE:
        for j in range(count):
            target[row, begin + j] = words[j]
    else:
        for offset in range(np.uintp(0), size, _LINE):
            store_line(to + offset, at + offset)


@numba.njit(nogil=True, cache=True)
def _sum(source, target, first, stride, rows, steps, magnitude):
    """`target` and `magnitude` may be None: then nothing is copied, and the largest magnitude is not looked for."""
    pairs = np.empty(TILE, np.uint64)
    mixed = pairs.view(np.uint32)
    negative_zero = np.int32(np.iinfo(source.dtype).min)
    written = np.empty(TILE, source.dtype)
    total, peak = np.uint64(0), np.int32(0)
    length = TILE // rows * rows
    for a in range(source.shape[0]):
        begin = 0
        while begin < source.shape[1]:
            place = first + np.uint64(a) * stride + np.uint64(begin // rows)
            to_next_high = np.int64(np.uint64(2**32) - (place & _LOW))
            count = min(length, source.shape[1] - begin, to_next_high)
            low, high = np.uint32(place & _LOW), np.uint32(place >> _HALF)
            u_key = np.uint32(low * _PLACE)
            v_key = np.uint32(np.uint32(low * _TWICE_ODD) + np.uint32(high * _TWICE_HIGH) + _ONE)
            words = source[a, begin : begin + count]
            for j in range(count):
                word = np.int32(words[j])
                if target is not None:
                    word = word if word != negative_zero else np.int32(0)
                    written[j] = word
                if magnitude is not None:
                    peak = max(peak, np.int32(word & magnitude))
                u = _mix(np.uint32(np.uint32(word) + np.uint32(steps[j] + u_key)))
                mixed[j] = u
                mixed[TILE + j] = np.uint32(u + u) ^ np.uint32(steps[TILE + j] + v_key)
            if count % 2:
                mixed[count] = 0  # u: the product is 0
            if target is not None:
                _store(written, target, a, begin, count)
            total += _add_products(pairs, (count + 1) // 2)
            begin += count
    if target is not None:
        finish_lines()
    return total, peak
