"""Steps over memory in whole vectors, for loops that numba compiles, which finds neither of them by itself.

They take addresses, and numba frees an array after its last use by name: take the address of a loop's own array inside
of the loop. numba's cache looks at the file of the loop alone: after a change here that file needs a change too.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line."""
_WORD = ir.IntType(32)
_EIGHT = ir.VectorType(_WORD, 8)


@intrinsic
def store_line(typing_context: Any, target: Any, source: Any) -> Any:
    """Copies a cache line past the cache, to an address that is a multiple of LINE. `finish_lines` after the last one.

    A usual store reads the line before it is written. For what nobody reads soon that is a third of a copy's traffic,
    and the cache goes to what is read.
    """

    def build(context: Any, builder: Any, signature: Any, addresses: Any) -> None:
        for offset in range(0, LINE, 32):
            vector = builder.load(_vector_at(builder, addresses[1], offset), align=4)
            store = builder.store(vector, _vector_at(builder, addresses[0], offset), align=32)
            store.set_metadata("nontemporal", builder.module.add_metadata([_WORD(1)]))

    return types.void(types.uintp, types.uintp), build


@intrinsic
def finish_lines(typing_context: Any) -> Any:
    """What `store_line` wrote is in memory before anything that is written later."""
    return types.void(), lambda context, builder, signature, arguments: builder.fence("seq_cst")


@intrinsic
def transpose_8x8(typing_context: Any, target: Any, target_row: Any, source: Any, source_row: Any) -> Any:
    """Writes a transposed tile of 8 x 8 words of 4 bytes; beside each address, the bytes from one row to the next."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        to, to_row, at, at_row = arguments
        rows = [builder.load(_vector_at(builder, at, builder.mul(at_row, at_row.type(i))), align=4) for i in range(8)]
        for size in (4, 2, 1):  # in each square of 2 * size words, exchange the upper right and the lower left quarter
            upper = _EIGHT([8 + i - size if i & size else i for i in range(8)])
            lower = _EIGHT([8 + i if i & size else i + size for i in range(8)])
            for i in [i for i in range(8) if not i & size]:
                pair = rows[i], rows[i + size]
                rows[i], rows[i + size] = (builder.shuffle_vector(*pair, mask) for mask in (upper, lower))
        for i, row in enumerate(rows):
            builder.store(row, _vector_at(builder, to, builder.mul(to_row, to_row.type(i))), align=4)

    return types.void(types.uintp, types.uintp, types.uintp, types.uintp), build


def _vector_at(builder: Any, address: Any, offset: Any) -> Any:
    offset = address.type(offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, offset), _EIGHT.as_pointer())
