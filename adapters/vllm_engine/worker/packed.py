"""Linear weights packed by torch's oneDNN, which can be written again and digested where they lie.

oneDNN chooses a packed layout by itself and says nothing about it. What it chose is found by packing the numbers of a
matrix's elements and looking where each one went. If that is blocks of rows (`Blocks`), the memory is used directly;
any other layout is packed by oneDNN anew and unpacked by it to be read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from adapters.hf_convert.blocks import Blocks

_INTEGERS = {4: torch.int32, 8: torch.int64}
"""Wide enough to number the elements of a matrix. Narrower weights are packed in pairs, which are no rows."""


class PackedLinear:
    """x [..., K] -> x @ weight.T + bias [..., N], with a packed weight [N, K]; what `layer.cpu_linear` is called as."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._pack(weight)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Args:
        weight: ignored; what vLLM keeps in the packed one's place.
        """
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    def load(self, weight: torch.Tensor) -> None:
        """Takes another weight of any shape; in place if it is of the same shape and dtype and lies in blocks."""
        blocks = self.blocks
        if blocks is None or (weight.shape, weight.dtype) != (blocks.shape, blocks.memory.dtype):
            return self._pack(weight)
        write_blocks(weight.detach(), blocks)

    def served(self) -> torch.Tensor | Blocks:
        """The weight as it is multiplied with, [N, K]."""
        return self.packed.to_dense() if self.blocks is None else self.blocks

    def _pack(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.blocks = _blocks_of(self.packed)


class PackedWhenUsed:
    """What an embedding is multiplied with where a model's head is tied to it; elsewhere it is never packed."""

    def __init__(self) -> None:
        self.packed: PackedLinear | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.packed = self.packed or PackedLinear(weight)
        return self.packed(x, weight, bias)


def forget_packed(model: torch.nn.Module) -> None:
    """Embeddings were written to: what was packed of them is old."""
    for module in model.modules():
        if isinstance(packed := getattr(module, "cpu_linear", None), PackedWhenUsed):
            packed.packed = None


def write_blocks(weight: torch.Tensor, blocks: Blocks) -> None:
    """Writes a matrix into the memory of blocks, of the same shape and dtype. Releases the interpreter lock."""
    assert (tuple(weight.shape), weight.dtype) == (blocks.shape, blocks.memory.dtype)
    if (compiled := _write_blocks()) is None:
        count, columns, rows = blocks.memory.shape
        blocks.memory.copy_(weight.reshape(count, rows, columns).transpose(1, 2))
        return
    integer = _INTEGERS[weight.element_size()]
    compiled(weight.contiguous().view(integer).numpy(), blocks.memory.view(integer).numpy())


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """True if torch's oneDNN packs linear weights of this dtype on this processor."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1, 1, dtype=dtype))
    except RuntimeError:
        return False
    return True


@functools.cache
def _write_blocks() -> Callable[..., None] | None:
    """The compiled loop; None where it finds no place for its cache. Its compiler upsets vLLM's start: not before."""
    try:
        from adapters.vllm_engine.worker.packed_kernel import write_blocks

        return write_blocks
    except RuntimeError:
        return None


def _blocks_of(packed: torch.Tensor) -> Blocks | None:
    """A packed weight's memory, if it has the layout that was found for its shape. The view keeps it alive."""
    found = _row_blocks(tuple(packed.shape), packed.dtype)
    if found is None or found[1] != _description(packed):
        return None
    rows, (count, columns) = found[0], packed.shape
    return Blocks(_memory(packed).view(packed.dtype).view(count // rows, columns, rows))


@functools.cache
def _row_blocks(shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, bytes] | None:
    """Rows in a block of oneDNN's layout for a shape, and its description of that layout.

    None: its layout is another one, or a packed number does not come back bit for bit.
    """
    integer = _INTEGERS.get(dtype.itemsize)
    if integer is None or shape[0] * shape[1] > torch.iinfo(integer).max:
        return None
    numbers = torch.arange(shape[0] * shape[1], dtype=integer).view(shape)
    packed = torch.ops.mkldnn._reorder_linear_weight(numbers.view(dtype))
    memory = _memory(packed).view(integer)
    is_column = memory[: shape[0]] == numbers[: len(memory), 0]
    rows = len(is_column) if is_column.all() else int(is_column.int().argmin())
    if len(memory) != numbers.numel() or rows % 8 or shape[0] % rows:
        return None  # padded, or not in blocks of whole vectors
    blocks = memory.view(-1, shape[1], rows)
    if not all(torch.equal(block, rows_of.t()) for block, rows_of in zip(blocks, numbers.split(rows), strict=True)):
        return None
    return rows, _description(packed)


def _description(packed: torch.Tensor) -> bytes:
    """oneDNN's own account of shape, dtype and layout: equal for tensors that lie in memory alike."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy())


def _memory(packed: torch.Tensor) -> torch.Tensor:
    """All bytes of a packed tensor, [n] uint8, which it owns as long as they are looked at."""
    size = torch.ops.mkldnn._nbytes(packed)
    view = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    view.owner = packed
    return torch.frombuffer(view, dtype=torch.uint8)
