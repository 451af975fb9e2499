"""Traces of rows in the worker's tables, and expert weights read back from the CPU kernel's layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapters.vllm_engine.worker.model_interface import TraceLayout
from adapters.vllm_engine.worker.records import CacheRows, Records

LAYOUT = TraceLayout(kind="experts", least=0, most=7, row_shape=(2, 2))


def records() -> Records:
    made = Records(policy_width=1, row_shape=LAYOUT.row_shape, unknown=LAYOUT.unknown)
    for name in ("a", "b"):
        made.open(name, known=np.zeros((0, 2, 2), np.uint8), capacity=3, reach=0, policy=(0.0,))
    return made


def rows(*values: int) -> np.ndarray:
    return np.array([np.full((2, 2), value) for value in values], np.uint8)


def test_what_a_byte_of_an_unseen_token_is() -> None:
    """Never a value that a trace may have."""
    assert LAYOUT.unknown == 255 and LAYOUT.row_bytes == 4
    loops = TraceLayout(kind="loops", least=1, most=4, prompt_value=4)
    assert loops.unknown == 0 and loops.row_bytes == 1


def test_rows_are_recorded_and_bind() -> None:
    """Value 0 is a value; a token that ran must run again as it did; the table grows without losing any."""
    table = records()
    slots, positions = table.slots(["a", "b", "b"]), np.array([0, 0, 1])
    assert (table.recorded(slots, positions) == 255).all()
    table.record(slots, positions, rows(0, 5, 7))
    table.open("c", known=rows(1, 2, 3, 4, 5), capacity=9, reach=0, policy=(0.0,))
    assert (table.recorded(slots, positions) == rows(0, 5, 7)).all()
    table.record(slots, positions, rows(0, 5, 7))
    with pytest.raises(RuntimeError, match="position 1 ran as .* its record says"):
        table.record(slots[2:], positions[2:], rows(6))
    assert table.take("b").trace == rows(5, 7).tobytes() and table.take("c").trace == rows(1, 2, 3, 4, 5).tobytes()


def test_a_cached_prefix_brings_its_rows() -> None:
    """What was written at a cache slot is what the next request there begins with; what nobody saw is refused."""
    table, cache = records(), CacheRows(num_slots=1024, row_shape=LAYOUT.row_shape, unknown=LAYOUT.unknown)
    cache.write(np.array([64, 65]), rows(3, 4))
    slot = int(table.slots(["a"])[0])
    table.adopt(slot, cache.read(np.array([64, 65])))
    assert table.known[slot] == 2 and (table.recorded(np.array([slot, slot]), np.array([0, 1])) == rows(3, 4)).all()
    with pytest.raises(RuntimeError, match="position 2 was taken from the prefix cache"):
        table.adopt(slot, cache.read(np.array([700])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_are_read_back_bitwise(dtype: torch.dtype) -> None:
    """Packing moves elements and nothing else; a weight that was never packed does not pass for a packed one."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    from adapters.vllm_engine.worker.experts import _unpack

    plain = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain[0, 0, :4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40]).to(dtype)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    packed = cpu_prepack_moe_weight(plain, "vec")
    assert torch.equal(_unpack(packed, "vec").view(bits), plain.view(bits))
    assert not torch.equal(packed, plain) and not torch.equal(_unpack(plain, "vec"), plain)
