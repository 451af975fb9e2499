"""A matrix is written into blocks of rows bit for bit: whole cache lines and what is left of them, aligned or not."""

from __future__ import annotations

import pytest
import torch

from adapters.vllm_engine.worker.packed_kernel import write_blocks

GUARD = 64
"""Bytes before and after what is written to, which stay as they are."""


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [8, 16, 24, 64])
@pytest.mark.parametrize("columns", [1, 16, 24, 37])
def test_every_element_is_in_its_place(columns: int, rows: int, dtype: torch.dtype, shift: int) -> None:
    """shift: bytes of the blocks' memory beyond a cache line."""
    count, limits = 3, torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(columns * rows)
    source = torch.randint(limits.min, limits.max, (count * rows, columns), dtype=dtype, generator=generator)
    room = torch.full((source.nbytes + 3 * GUARD,), 7, dtype=torch.uint8)
    begin = GUARD + -room.data_ptr() % 64 + shift
    target = room[begin : begin + source.nbytes].view(dtype).view(count, columns, rows)
    write_blocks(source.numpy(), target.numpy())
    for b in range(count):
        for r in range(rows):
            assert torch.equal(target[b, :, r], source[b * rows + r]), (b, r)
    assert (room[:begin] == 7).all() and (room[begin + source.nbytes :] == 7).all()
