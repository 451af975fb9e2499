"""Content digests of tensors that add up: the digests of disjoint parts of a tensor sum to the digest of the whole.

    digest(x) = sum over all elements i of  mix(bits(x[i]) + (i + 1) * GOLDEN)   mod 2**64

`bits` is the element's bit pattern read as a signed integer of its width, `i` its flat row-major index in the *global*
tensor, GOLDEN the odd integer closest to 2**64 / golden ratio (the increment of splitmix64), and `mix` the bijection

    z ^= z >> 32;  z *= MULTIPLIER;  z ^= z >> 32;  z *= MULTIPLIER;  z ^= z >> 32

(shifts are logical; constant and structure are degski's 64-bit finaliser). Shifting by half a word costs one strided
XOR of the two 32-bit halves, in place. All of it is integer arithmetic that wraps, so the value is the same on every
device and for every partition and order of summation; a shard only needs to know its place.

It sees what a sum of values does not: two elements exchanged, a shard put in another's place, -0.0 against 0.0, the
payload of a NaN. One changed element always changes the digest; other changes go unseen with probability 2**-64. It
is a checksum against mistakes, not a cryptographic hash: whoever wants a collision can construct one. Dtype and shape
are not part of it and are compared beside it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from adapters.hf_convert.blocks import Blocks

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER = 0xD6E8FEB86659FD93
COMPILED_ELEMENTS = 1 << 20
"""From here on the compiled loop is worth what importing numba costs. Once it is there, it takes every tensor."""
EXPONENTS = {
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
}
"""The bits that are all set in infinities and NaNs."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a whole tensor, 16 hex digits. Reads it once; needs no more than a few MB beside it."""
    return render_digest(partial_digest(tensor, shape=tensor.shape))


def finite_digest(tensor: torch.Tensor) -> tuple[str, bool]:
    """`tensor_digest`, and whether every element is finite: on CPU in the same pass."""
    exponent = EXPONENTS.get(tensor.dtype)
    if exponent is not None and (kernel := _kernel_for(tensor)):
        bits = _bits(tensor).view(1, 1, -1)
        total, is_finite = kernel.sum_of_mixed(bits, first=1, steps=(0, 0, 1), exponent=exponent)
        return render_digest(total), is_finite
    bounds = torch.aminmax(tensor) if tensor.numel() else ()
    return tensor_digest(tensor), all(math.isfinite(bound) for bound in bounds)  # NaN is both, if there is one


def copy_without_negative_zeros(source: torch.Tensor, target: torch.Tensor) -> str:
    """Writes `source` to `target`, of the same shape and dtype -> the digest of what was written.

    On CPU in one pass.
    """
    if source.dtype in EXPONENTS and target.is_contiguous() and not target.is_cuda and (kernel := _kernel_for(source)):
        return render_digest(kernel.copy_sum_of_mixed(_bits(source), _bits(target)))
    return tensor_digest(torch.add(source, 0, out=target))  # -0.0 + 0 is 0.0


def render_digest(total: int) -> str:
    """The text of a digest from the sum of its parts, which may be signed and of any size."""
    return f"{total % 2**64:016x}"


def partial_digest(part: torch.Tensor | Blocks, *, shape: Sequence[int], dim: int = 0, offset: int = 0) -> int:
    """What one part contributes to the digest of a tensor: an integer in [0, 2**64).

    Args:
        part: the elements at [offset, offset + part.shape[dim]) along `dim` of the global tensor, whole in every other
            dimension. A tensor that is not contiguous is copied first.
        shape: of the global tensor.
        dim: the dimension that is cut.
        offset: where the part begins along `dim`.

    Raises:
        ValueError: the part does not fit into the global tensor there.
    """
    check_place(tuple(part.shape), tuple(shape), dim, offset)
    if isinstance(part, Blocks):
        return _of_blocks(part, shape=shape, first=offset * math.prod(shape[dim + 1 :]))
    if part.numel() == 0:
        return 0
    first, stride, num_rows = place_in(part.shape, shape, dim, offset)
    bits = _bits(part).view(num_rows, -1)
    compiled = _compiled(bits.device.type) if _is_worth_compiling(bits) else None
    return (compiled or _sum_of_mixed)(bits, first=first, stride=stride)


def place_in(part: Sequence[int], shape: Sequence[int], dim: int, offset: int) -> tuple[int, int, int]:
    """Of a part [offset, offset + part[dim]) along `dim`: global index of its first element, elements from one of its
    rows to the next, and how many rows it has when everything from `dim` on is one."""
    inner = math.prod(part[dim + 1 :])
    return offset * inner, (shape[dim] * inner if shape else 1), math.prod(part[:dim])


def _of_blocks(part: Blocks, *, shape: Sequence[int], first: int) -> int:
    """The part's element (0, 0) is element `first` of the global matrix."""
    memory, columns = part.memory.detach(), shape[1]
    if (kernel := _kernel()) is None or not memory.is_contiguous() or memory.device.type != "cpu":
        return _sum_of_mixed(_bits(part.dense()).view(part.shape), first=first, stride=columns)
    bits = _bits(memory).view(memory.shape)
    return kernel.sum_of_mixed(bits, first=first + 1, steps=(memory.shape[2] * columns, 1, columns))[0]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bit patterns as signed integers of their width, [n]; a view where memory is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def check_place(part: tuple[int, ...], shape: tuple[int, ...], dim: int, offset: int) -> None:
    if part == shape and offset == 0:
        return
    fits = len(part) == len(shape) and 0 <= dim < len(shape) and 0 <= offset <= shape[dim] - part[dim]
    if not fits or part[:dim] + part[dim + 1 :] != shape[:dim] + shape[dim + 1 :]:
        raise ValueError(
            f"digest: a part of shape {part} at {offset} along dimension {dim} is outside of shape {shape}"
        )


@functools.cache
def _compiled(device_type: str) -> Callable[..., int] | None:
    """The same sum by a compiled loop; None where its compiler is not installed or finds no place for its cache."""
    try:
        if device_type == "cpu":
            return _by_numba()
        return _by_triton() if device_type == "cuda" else None
    except (ImportError, RuntimeError):
        return None


def _kernel_for(tensor: torch.Tensor) -> ModuleType | None:
    """The loops compiled for CPU, if it is there and large enough to be worth importing their compiler."""
    return _kernel() if tensor.device.type == "cpu" and _is_worth_compiling(tensor) else None


def _is_worth_compiling(tensor: torch.Tensor) -> bool:
    return tensor.numel() >= COMPILED_ELEMENTS or f"{__name__}_kernel" in sys.modules


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from adapters.hf_convert import digest_kernel

        return digest_kernel
    except (ImportError, RuntimeError):
        return None


def _by_numba() -> Callable[..., int] | None:
    if (kernel := _kernel()) is None:
        return None
    return lambda bits, *, first, stride: kernel.sum_of_mixed(bits[None], first=first + 1, steps=(0, stride, 1))[0]


def _by_triton() -> Callable[..., int]:
    from adapters.hf_convert.digest_triton import Span, sums_of_mixed

    def compiled(bits: torch.Tensor, *, first: int, stride: int) -> int:
        span = Span(source=bits, columns=bits.shape[1], first=first, stride=stride)
        return int(sums_of_mixed([span], exponent=0, golden=GOLDEN, multiplier=MULTIPLIER)[0, 0]) % 2**64

    return compiled


def _sum_of_mixed(bits: torch.Tensor, *, first: int, stride: int) -> int:
    """`bits[r, c]` is element `first + r * stride + c` of the global tensor."""
    device = bits.device
    tile_elements = 1 << 16 if device.type == "cpu" else 1 << 22  # two halves in the L2 cache; few kernel launches
    columns = min(bits.shape[1], tile_elements)
    rows = min(bits.shape[0], tile_elements // columns)
    scratch = torch.empty(rows * columns, dtype=torch.int64, device=device)
    column_keys = torch.arange(columns, dtype=torch.int64, device=device) * _signed(GOLDEN)
    row_keys = torch.arange(rows, dtype=torch.int64, device=device)[:, None] * _signed(stride * GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for row, column, tile in _tiles(bits, rows, columns):
        height, width = tile.shape
        mixed = scratch[: height * width].view(height, width)
        torch.add(tile, column_keys[:width], out=mixed)
        mixed.add_(row_keys[:height] + _signed((first + row * stride + column + 1) * GOLDEN))
        total += _mix_(mixed).sum()
    return int(total) % 2**64


def _tiles(bits: torch.Tensor, rows: int, columns: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    for row in range(0, bits.shape[0], rows):
        for column in range(0, bits.shape[1], columns):
            yield row, column, bits[row : row + rows, column : column + columns]


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """`mix` of the module's docstring, in place. Little-endian, as all that torch runs on: the low half comes first."""
    halves = z.view(torch.int32)
    low, high = halves[..., ::2], halves[..., 1::2]
    for _ in range(2):
        low ^= high
        z.mul_(_signed(MULTIPLIER))
    low ^= high
    return z


def _signed(value: int) -> int:
    """The int64 that has the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63
