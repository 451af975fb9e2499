"""The digest's inner loop compiled by numba, where numba is installed (vLLM brings it). `digest.py` is its reference.

One pass at about a nanosecond an element, where torch needs a dozen passes over a tile. Same value, bit for bit.
"""

from __future__ import annotations

try:
    import numba
    import numpy as np
except ImportError as error:  # hf_convert needs torch and safetensors only; torch's own loop serves
    raise ImportError("the compiled digest needs numba; without it digest.py computes the same value") from error

_SHIFT = np.uint64(32)


@numba.njit(nogil=True, cache=True)
def sum_of_mixed(bits, first, row_step, golden, multiplier):
    """Sum of mix(bits[r, c] + first + r * row_step + c * golden) mod 2**64; all of first .. multiplier are uint64.

    Args:
        bits: [rows, columns] signed integers, any width.
    """
    total = np.uint64(0)
    for r in range(bits.shape[0]):
        row_key = first + np.uint64(r) * row_step
        for c in range(bits.shape[1]):
            z = np.uint64(np.int64(bits[r, c])) + row_key + np.uint64(c) * golden
            z ^= z >> _SHIFT
            z *= multiplier
            z ^= z >> _SHIFT
            z *= multiplier
            z ^= z >> _SHIFT
            total += z
    return total
