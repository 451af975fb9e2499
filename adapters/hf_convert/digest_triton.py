"""The digest's inner loop as a Triton kernel, for CUDA tensors. `digest.py` is its reference, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
"""Elements of one step of a program."""
PROGRAMS_PER_PROCESSOR = 8


def sum_of_mixed(bits: torch.Tensor, *, first: int, row_step: int, golden: int, multiplier: int) -> int:
    """Sum of mix(bits[r, c] + first + r * row_step + c * golden) mod 2**64, read once.

    Args:
        bits: contiguous [rows, columns] signed integers of any width, on a CUDA device.
        first, row_step, golden, multiplier: any integers; their low 64 bits count.
    """
    processors = torch.cuda.get_device_properties(bits.device).multi_processor_count
    programs = min(triton.cdiv(bits.numel(), TILE), PROGRAMS_PER_PROCESSOR * processors)
    sums = torch.empty(programs, dtype=torch.int64, device=bits.device)
    keys = torch.tensor([_signed(key) for key in (first, row_step, golden, multiplier)], dtype=torch.int64)
    with torch.cuda.device(bits.device):
        _kernel[(programs,)](
            bits, sums, keys.to(bits.device), bits.numel(), bits.shape[1], ONE_ROW=bits.shape[0] == 1, TILE=TILE
        )
    return int(sums.sum())


@triton.jit
def _kernel(bits, sums, keys, num_elements, num_columns, ONE_ROW: tl.constexpr, TILE: tl.constexpr):
    first, row_step = tl.load(keys).to(tl.uint64), tl.load(keys + 1).to(tl.uint64)
    golden, multiplier = tl.load(keys + 2).to(tl.uint64), tl.load(keys + 3).to(tl.uint64)
    total = tl.zeros([TILE], dtype=tl.uint64)
    stride = tl.num_programs(0).to(tl.int64) * TILE
    for start in range(tl.program_id(0).to(tl.int64) * TILE, num_elements, stride):
        i = start + tl.arange(0, TILE)
        inside = i < num_elements
        z = tl.load(bits + i, mask=inside, other=0).to(tl.int64).to(tl.uint64) + first
        if ONE_ROW:
            z += i.to(tl.uint64) * golden
        else:
            row = i // num_columns
            z += row.to(tl.uint64) * row_step + (i - row * num_columns).to(tl.uint64) * golden
        z ^= z >> 32
        z *= multiplier
        z ^= z >> 32
        z *= multiplier
        z ^= z >> 32
        total += tl.where(inside, z, 0)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0).to(tl.int64))


def _signed(value: int) -> int:
    """The int64 that has the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63
