"""The digest's inner loop as a Triton kernel: many CUDA tensors in one launch. `digest.py` is its reference.

A launch costs as much as a megabyte read, and a synchronisation more: a version of some hundred tensors is read by one
kernel whose programs take pieces of all of them, and its sums come back together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from adapters.hf_convert.digest_constants import HIGH, MULTIPLIERS, ODD, PLACE

TILE = 2048
"""Words of one step of a program."""
PIECE = 32 * TILE
"""Words that one program sums."""
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@dataclass(frozen=True, kw_only=True)
class Span:
    """Words that lie together on a device; the one at (r, c) is at place `first + r * stride + c + 1` of a tensor.

    Their bits are read as signed integers, whatever the dtype.
    """

    source: torch.Tensor
    """Contiguous, of 1, 2 or 4 bytes; `columns` of its words are a row."""
    columns: int
    first: int = 0
    stride: int = 0
    target: torch.Tensor | None = None
    """Where the words are copied to, the least integer (a negative zero's bits) as 0; contiguous, of this dtype."""


def sums_of_products(spans: Sequence[Span], *, exponent: int) -> torch.Tensor:
    """Reads every span once, and does not wait for it.

    Args:
        spans: not empty, of one element size, on one device; all with a target or none.
        exponent: the bits that are all set in infinities and NaNs; 0 if there are none.

    Returns:
        [spans, 2] int64 on the device: the sum of u * v of `digest`, whose low 64 bits count; 0 if every word is
        finite.
    """
    device, size = spans[0].source.device, spans[0].source.element_size()
    one_row = all(span.columns == span.source.numel() for span in spans)
    table = torch.from_numpy(_table(spans)).to(device)
    pieces = _pieces(tuple(span.source.numel() for span in spans), device)
    found = torch.zeros(len(spans), 2, dtype=torch.int64, device=device)
    with torch.cuda.device_of(spans[0].source):
        _kernel[(len(pieces),)](
            table,
            pieces,
            found,
            PLACE=PLACE,
            TWICE_ODD=2 * ODD % 2**32,
            TWICE_HIGH=2 * HIGH % 2**32,
            FIRST=MULTIPLIERS[0],
            SECOND=MULTIPLIERS[1],
            EXPONENT=exponent,
            NEGATIVE_ZERO=-(1 << (8 * size - 1)),
            WORD=_WORDS[size],
            ONE_ROW=one_row,
            COPY=spans[0].target is not None,
            TILE=TILE,
            PIECE=PIECE,
        )
    return found


def _table(spans: Sequence[Span]) -> np.ndarray:
    """[spans, 6]: addresses of words and copies, their number, columns, first place, places from row to row."""
    rows = [
        (
            span.source.data_ptr(),
            0 if span.target is None else span.target.data_ptr(),
            span.source.numel(),
            span.columns,
            span.first + 1,
            span.stride,
        )
        for span in spans
    ]
    return np.array(rows, np.uint64).view(np.int64)


@functools.lru_cache(maxsize=32)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[programs, 2] int32: the span of each program, and which of its pieces."""
    counts = -(-np.array(sizes) // PIECE)
    spans = np.repeat(np.arange(len(sizes)), counts)
    places = np.arange(len(spans)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.stack([spans, places], 1).astype(np.int32)).to(device)


@triton.jit
def _kernel(
    table,
    pieces,
    found,
    PLACE: tl.constexpr,
    TWICE_ODD: tl.constexpr,
    TWICE_HIGH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXPONENT: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr,
    WORD: tl.constexpr,
    ONE_ROW: tl.constexpr,
    COPY: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    program = tl.program_id(0)
    span = tl.load(pieces + 2 * program).to(tl.int64)
    start = tl.load(pieces + 2 * program + 1).to(tl.int64) * PIECE
    fields = table + 6 * span
    source = tl.load(fields).to(tl.pointer_type(WORD))
    target = tl.load(fields + 1).to(tl.pointer_type(WORD))
    num_words, num_columns = tl.load(fields + 2), tl.load(fields + 3)
    first, stride = tl.load(fields + 4), tl.load(fields + 5)
    offsets = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.uint64)
    not_finite = tl.zeros([TILE], dtype=tl.int32)
    for begin in range(start, tl.minimum(start + PIECE, num_words), TILE):
        i = begin + offsets
        inside = i < num_words
        word = tl.load(source + i, mask=inside, other=0)
        if COPY:
            word = tl.where(word == NEGATIVE_ZERO, 0, word).to(WORD)
            tl.store(target + i, word, mask=inside)
        if EXPONENT != 0:
            not_finite |= ((word & EXPONENT) == EXPONENT).to(tl.int32)
        if ONE_ROW:
            place = first + i
        else:
            row = i // num_columns
            place = first + row * stride + (i - row * num_columns)
        low, high = place.to(tl.uint32), (place >> 32).to(tl.uint32)
        u = word.to(tl.int32).to(tl.uint32, bitcast=True) + low * PLACE
        u ^= u >> 16
        u *= FIRST
        u ^= u >> 15
        u *= SECOND
        u ^= u >> 15
        v = (u + u) ^ (low * TWICE_ODD + high * TWICE_HIGH + 1)
        total += tl.where(inside, u.to(tl.uint64) * v.to(tl.uint64), 0)
    tl.atomic_add(found + 2 * span, tl.sum(total, axis=0).to(tl.int64))
    if EXPONENT != 0:
        tl.atomic_or(found + 2 * span + 1, tl.max(not_finite, axis=0).to(tl.int64))
