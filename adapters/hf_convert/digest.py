"""Content digests of tensors that add up: the digests of disjoint parts of a tensor sum to the digest of the whole.

    digest(x) = sum over all places n = 1, 2, ... of  u * v   mod 2**64
    u = mix(bits(x[n - 1]) + n * PLACE)                                  mod 2**32
    v = (2 * u) xor (2 * (n * ODD + (n >> 32) * HIGH) + 1)               mod 2**32

`bits` is the element's bit pattern read as a signed integer of its width, `n` its flat row-major place in the *global*
tensor. An element of 8 bytes is two of 4, the low half first. `mix` is the bijection of 32-bit words

    z ^= z >> 16;  z *= MULTIPLIERS[0];  z ^= z >> 15;  z *= MULTIPLIERS[1];  z ^= z >> 15

whose form is that of MurmurHash3's finaliser; these constants have the least avalanche bias that is known for it (the
list in the README of github.com/skeeto/hash-prospector). PLACE, ODD and HIGH are the odd integers closest to 2**32 / g,
/ g**2, / g**3 with g**4 = g + 1, whose multiples spread evenly in three dimensions.

Why so: AVX2 and GPUs multiply 32 by 32 bits, in lanes of 32 (mix) and into 64 (u * v), and have nothing wider.
All of it is integer arithmetic that wraps, so the value is the same on every device and for every partition and order
of summation; a shard only needs to know its place.

One changed element of at most 4 bytes always changes the digest: v is odd, and bit j of it depends on bits of u below j
alone, so the low half of u * v is a bijection of u, and u one of the element. It also sees what a sum of values does
not: two elements exchanged, a shard put in another's place, -0.0 against 0.0, the payload of a NaN. Other changes go
unseen with probability close to 2**-64: the same sum of words of w bits, counted over all changes of two elements,
misses 1.2 times 2**-2w of them, and of three 1.02 times (`tests/unit/hf_convert/test_digest_strength.py`). The place
enters twice, since n * PLACE alone is as far apart as their values for some pairs of elements, and exchanging two such
pairs would go unseen. It is a checksum against mistakes, not a cryptographic hash: whoever wants a collision can
construct one. Dtype and shape are not part of it and are compared beside it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from adapters.hf_convert.blocks import Blocks
from adapters.hf_convert.digest_constants import HIGH, MULTIPLIERS, ODD, PLACE

FORMULA = 2
"""The number of this formula, which is kept beside digests that are stored."""
COMPILED_ELEMENTS = 1 << 20
"""From here on the compiled loop is worth what importing numba costs. Once it is there, it takes every tensor."""
EXPONENTS = {
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
}
"""The bits that are all set in infinities and NaNs, of the dtypes that the compiled loops look at in one pass."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MASK = 2**32 - 1


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a whole tensor, 16 hex digits. Reads it once; needs no more than a few MB beside it."""
    return render_digest(partial_digest(tensor, shape=tensor.shape))


def finite_digest(tensor: torch.Tensor) -> tuple[str, bool]:
    """`tensor_digest`, and whether every element is finite: on CPU in the same pass."""
    exponent = EXPONENTS.get(tensor.dtype)
    if exponent is not None and (kernel := _kernel_for(tensor)):
        total, is_finite = kernel.sum_of_products(words_of(tensor)[None], first=0, exponent=exponent)
        return render_digest(total), is_finite
    bounds = torch.aminmax(tensor) if tensor.numel() else ()
    return tensor_digest(tensor), all(math.isfinite(bound) for bound in bounds)  # NaN is both, if there is one


def copy_without_negative_zeros(source: torch.Tensor, target: torch.Tensor) -> str:
    """Writes `source` to `target`, of the same shape and dtype -> the digest of what was written.

    On CPU in one pass.
    """
    if source.dtype in EXPONENTS and target.is_contiguous() and not target.is_cuda and (kernel := _kernel_for(source)):
        return render_digest(kernel.copy_sum_of_products(words_of(source), words_of(target)))
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
    return _of_rows(part.reshape(num_rows, -1), first=first, stride=stride)


def place_in(part: Sequence[int], shape: Sequence[int], dim: int, offset: int) -> tuple[int, int, int]:
    """Of a part [offset, offset + part[dim]) along `dim`: global index of its first element, elements from one of its
    rows to the next, and how many rows it has when everything from `dim` on is one."""
    inner = math.prod(part[dim + 1 :])
    return offset * inner, (shape[dim] * inner if shape else 1), math.prod(part[:dim])


def _of_rows(matrix: torch.Tensor, *, first: int, stride: int) -> int:
    """`matrix[r, c]` is element `first + r * stride + c` of the global tensor, from 0."""
    words = words_of(matrix)
    each = words.numel() // matrix.numel()
    add_up = (_compiled(words.device.type) if _is_worth_compiling(words) else None) or _sum_of_products
    return add_up(words.view(matrix.shape[0], -1), first=first * each, stride=stride * each)


def _of_blocks(part: Blocks, *, shape: Sequence[int], first: int) -> int:
    """The part's element (0, 0) is element `first` of the global matrix. Read where it lies, if the loop can."""
    memory, columns = part.memory.detach(), shape[1]
    last = first + (part.shape[0] - 1) * columns + part.shape[1]
    in_place = memory.is_contiguous() and memory.element_size() < 8 and first + 1 >> 32 == last >> 32
    if not in_place or memory.device.type != "cpu" or (kernel := _kernel()) is None or memory.shape[2] > kernel.TILE:
        return _of_rows(part.dense(), first=first, stride=columns)
    rows = memory.shape[2]
    words = words_of(memory).view(memory.shape[0], -1)
    return kernel.sum_of_products(words, first=first, stride=rows * columns, rows=rows, columns=columns)[0]


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bit patterns as signed integers of their width, two of 4 bytes for 8: [n], [2n].

    A view where memory is contiguous.
    """
    return tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.element_size()])


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
    return lambda words, *, first, stride: kernel.sum_of_products(words, first=first, stride=stride)[0]


def _by_triton() -> Callable[..., int]:
    from adapters.hf_convert.digest_triton import Span, sums_of_products

    def compiled(words: torch.Tensor, *, first: int, stride: int) -> int:
        span = Span(source=words, columns=words.shape[1], first=first, stride=stride)
        return int(sums_of_products([span], exponent=0)[0, 0]) % 2**64

    return compiled


def _sum_of_products(words: torch.Tensor, *, first: int, stride: int) -> int:
    """`words[r, c]` is at place `first + r * stride + c + 1`."""
    device = words.device
    tile_words = 1 << 15 if device.type == "cpu" else 1 << 22  # stays in the L2 cache; few kernel launches
    columns = min(words.shape[1], tile_words)
    rows = min(words.shape[0], tile_words // columns)
    places = torch.arange(rows, device=device)[:, None] * stride + torch.arange(columns, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for row, column, tile in _tiles(words, rows, columns):
        height, width = tile.shape
        total += _products(tile, places[:height, :width] + (first + row * stride + column + 1)).sum()
    return int(total) % 2**64


def _tiles(words: torch.Tensor, rows: int, columns: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    for row in range(0, words.shape[0], rows):
        for column in range(0, words.shape[1], columns):
            yield row, column, words[row : row + rows, column : column + columns]


def _products(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """u * v of the module's docstring, mod 2**64, as int64."""
    u = (words + places * PLACE).bitwise_and_(_MASK)
    u ^= u >> 16
    u = u.mul_(MULTIPLIERS[0]).bitwise_and_(_MASK)
    u ^= u >> 15
    u = u.mul_(MULTIPLIERS[1]).bitwise_and_(_MASK)
    u ^= u >> 15
    key = (places * ODD).add_((places >> 32).mul_(HIGH)).mul_(2).add_(1)
    return (2 * u).bitwise_xor_(key).bitwise_and_(_MASK).mul_(u)
