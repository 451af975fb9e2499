"""The digest: its formula, that parts add up wherever a tensor is cut, and that it sees what sums do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.hf_convert import digest
from adapters.hf_convert.blocks import Blocks
from adapters.hf_convert.digest import (
    copy_without_negative_zeros,
    finite_digest,
    partial_digest,
    render_digest,
    tensor_digest,
)
from adapters.hf_convert.manifest import manifest_of

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def plain_digest(tensor: torch.Tensor) -> str:
    """The documented formula in Python integers."""
    words = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()]).tolist()
    return f"{sum(plain_product(word, place) for place, word in enumerate(words, 1)) % 2**64:016x}"


def plain_product(word: int, place: int) -> int:
    z = (word + place * 0xD1B54A33) % 2**32
    z = (z ^ z >> 16) * 0x21F0AAAD % 2**32
    z = (z ^ z >> 15) * 0xD35A2D97 % 2**32
    u = z ^ z >> 15
    return u * (2 * u % 2**32 ^ (2 * (place * 0xABC98389 + (place >> 32) * 0x8CB92BA7) + 1) % 2**32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4)])
def test_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`tensor_digest` is the formula of its docstring, for every dtype width, scalars and empty tensors."""
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert tensor_digest(tensor) == plain_digest(tensor)


def test_larger_than_a_tile() -> None:
    """Tiling changes nothing: more elements than a tile holds, in one row and in many."""
    tensor = torch.randn(3, 70_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert tensor_digest(tensor) == plain_digest(tensor) == tensor_digest(tensor.view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_the_compiled_loop_is_torchs(dtype: torch.dtype) -> None:
    """numba's tiles and torch's give the same value, in rows that lie apart and beyond 2**32 words."""
    pytest.importorskip("numba")
    tensor = (torch.randn(5, 3001, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    words = digest.words_of(tensor).view(5, -1)
    compiled = digest._compiled("cpu")
    assert compiled is not None
    for first, stride in ((0, 0), (7, 9000), (2**32 - 9001, 3001), (2**61 - 5, 2**40 + 1)):
        arguments = {"first": first, "stride": stride}
        assert compiled(words, **arguments) == digest._sum_of_products(words, **arguments)


@pytest.mark.parametrize("first", [2**32 - 3, 5 * 2**32 - 3, 2**61])
def test_places_beyond_32_bits(first: int) -> None:
    """A part of a tensor of more than 2**32 elements; 2**32 places further the same elements count otherwise."""
    tensor = torch.randn(7, generator=torch.Generator().manual_seed(0))
    words = tensor.view(torch.int32).tolist()
    expected = sum(plain_product(word, first + place) for place, word in enumerate(words, 1)) % 2**64
    assert partial_digest(tensor, shape=(2**62,), offset=first) == expected
    assert partial_digest(tensor, shape=(2**62,), offset=first + 2**32) != expected
    column = first % 2**33  # of a wide matrix
    expected = sum(plain_product(word, column + row * 2**33 + 1) for row, word in enumerate(words)) % 2**64
    assert partial_digest(tensor.view(7, 1), shape=(7, 2**33), dim=1, offset=column) == expected


COMPILED, PLAIN = digest.COMPILED_ELEMENTS, 77
"""Numbers of elements that take the compiled loops, and torch's."""


@pytest.mark.parametrize("size", [COMPILED, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_is_seen_beside_the_digest(size: int, dtype: torch.dtype) -> None:
    """One NaN or infinity, of either sign, at either end; the largest finite number and denormals are finite."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    limits = torch.finfo(dtype)
    tensor[1:5] = torch.tensor([limits.max, limits.min, -limits.tiny / 4, -0.0], dtype=dtype)
    assert finite_digest(tensor) == (tensor_digest(tensor), True)
    for value in (float("nan"), float("inf"), -float("inf")):
        for place in (0, -1):
            broken = tensor.clone()
            broken[place] = value
            assert finite_digest(broken) == (tensor_digest(broken), False)


def test_integers_are_finite() -> None:
    """All bits set is -1 there."""
    tensor = torch.full((COMPILED,), -1, dtype=torch.int32)
    assert finite_digest(tensor) == (tensor_digest(tensor), True)
    assert finite_digest(torch.empty(0, 3)) == (tensor_digest(torch.empty(0, 3)), True)


@pytest.mark.parametrize("size", [COMPILED, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_a_copy_has_no_negative_zeros_and_its_own_digest(size: int, dtype: torch.dtype) -> None:
    """Everything else is copied bitwise; the least integer, whose bits are a negative zero's, too."""
    wide = torch.randn(size * 2, generator=torch.Generator().manual_seed(0)) * 50
    wide[::3] = -0.0
    wide = wide.to(dtype)
    if not dtype.is_floating_point:
        wide[::5] = torch.iinfo(dtype).min
    for source in (wide[:size], wide[::2]):  # contiguous or not
        expected = torch.where(source == 0, torch.zeros_like(source), source).contiguous()
        target = torch.full_like(expected, 7)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
        assert copy_without_negative_zeros(source, target) == tensor_digest(expected)
        assert torch.equal(target.view(bits), expected.view(bits))


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("size", [COMPILED, COMPILED + 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_writes_its_target_alone_on_cache_lines_or_not(dtype: torch.dtype, size: int, shift: int) -> None:
    """shift: bytes of the target beyond a cache line. In place, too."""
    source = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    room = torch.full((source.nbytes + 256,), 7, dtype=torch.uint8)
    begin = 64 + -room.data_ptr() % 64 + shift
    end = begin + source.nbytes
    target = room[begin:end].view(dtype)
    assert copy_without_negative_zeros(source, target) == tensor_digest(source)
    assert torch.equal(target, source) and (room[:begin] == 7).all() and (room[end:] == 7).all()
    target[5] = -0.0
    assert copy_without_negative_zeros(target, target) == tensor_digest(target)
    assert not target[5].signbit() and torch.equal(target[6:], source[6:])


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_are_digested_as_the_matrix_they_hold(rows: int, dtype: torch.dtype) -> None:
    """Whole, and in parts along either dimension of a larger matrix; other parts of them are copies."""
    matrix = torch.randn(96, 40, generator=torch.Generator().manual_seed(0), dtype=dtype)

    def in_blocks(part: torch.Tensor) -> Blocks:
        count, columns = part.shape
        memory = torch.empty(count // rows, columns, rows, dtype=dtype)
        for r in range(count):
            memory[r // rows, :, r % rows] = part[r]
        return Blocks(memory)

    whole = in_blocks(matrix)
    assert whole.shape == (96, 40) and torch.equal(whole.dense(), matrix)
    assert render_digest(partial_digest(whole, shape=(96, 40))) == plain_digest(matrix)
    below = in_blocks(matrix[48:])
    expected = partial_digest(matrix[48:], shape=(96, 40), offset=48)
    assert partial_digest(below, shape=(96, 40), offset=48) == expected
    narrowed = whole.narrow(0, 48, 48)
    assert isinstance(narrowed, Blocks) and narrowed.memory.data_ptr() == whole.memory[48 // rows :].data_ptr()
    assert partial_digest(narrowed, shape=(96, 40), offset=48) == expected
    right = in_blocks(matrix[:, 30:])
    assert partial_digest(right, shape=(96, 40), dim=1, offset=30) == partial_digest(
        matrix[:, 30:], shape=(96, 40), dim=1, offset=30
    )
    for dim, start, length in ((0, 3, 48), (0, 48, 5), (1, 0, 39), (1, 2, 38)):
        assert torch.equal(whole.narrow(dim, start, length), matrix.narrow(dim, start, length))
    assert whole.narrow(1, 0, 40) is whole
    far = (2**32 - 30) // 40  # the second block of rows is beyond 2**32 elements
    expected = partial_digest(matrix, shape=(2**40, 40), offset=far)
    assert partial_digest(whole, shape=(2**40, 40), offset=far) == expected
    whole.memory[1, 2, 3] += 1
    assert render_digest(partial_digest(whole, shape=(96, 40))) != plain_digest(matrix)


@pytest.mark.parametrize("rows", [1, 12, 16])
def test_blocks_that_are_more_than_a_tile(rows: int) -> None:
    """Tiles end between two columns of a block, also where its rows do not divide them."""
    memory = torch.randn(3, 301, rows, generator=torch.Generator().manual_seed(0))
    dense = memory.transpose(1, 2).reshape(3 * rows, 301)
    assert render_digest(partial_digest(Blocks(memory), shape=(3 * rows, 301))) == plain_digest(dense)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_add_up(data: st.DataObject) -> None:
    """However a tensor is cut, along any dimension into uneven parts, the parts sum to the whole."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.sets(st.integers(1, shape[dim] - 1)))) if shape[dim] > 1 else []
    tensor = torch.randn(shape)
    bounds = zip([0, *cuts], [*cuts, shape[dim]], strict=True)
    parts = [
        partial_digest(tensor.narrow(dim, low, high - low), shape=shape, dim=dim, offset=low) for low, high in bounds
    ]
    assert render_digest(sum(parts)) == tensor_digest(tensor)
    signed = [part - 2**64 if part >= 2**63 else part for part in parts]  # as an int64 all-reduce would carry them
    assert render_digest(sum(signed)) == tensor_digest(tensor)


def test_parts_of_a_large_matrix_add_up() -> None:
    """Row-parallel and column-parallel shards of a matrix that spans many tiles."""
    tensor = torch.randn(512, 640)
    for dim in (0, 1):
        shards = tensor.chunk(4, dim)
        width = shards[0].shape[dim]
        parts = [partial_digest(s, shape=(512, 640), dim=dim, offset=i * width) for i, s in enumerate(shards)]
        assert render_digest(sum(parts)) == tensor_digest(tensor)
        moved = [partial_digest(s, shape=(512, 640), dim=dim, offset=(3 - i) * width) for i, s in enumerate(shards)]
        assert render_digest(sum(moved)) != tensor_digest(tensor)


@pytest.mark.parametrize("change", ["swap", "one bit", "negative zero", "zeros elsewhere"])
def test_changes_are_seen(change: str) -> None:
    """Changes that keep the sum, the multiset or the numeric value of the elements still change the digest."""
    tensor = torch.zeros(64)
    tensor[:3] = torch.tensor([1.0, 2.0, 3.0])
    changed = tensor.clone()
    if change == "swap":
        changed[0], changed[1] = tensor[1], tensor[0]
    elif change == "one bit":
        changed.view(torch.int32)[40] = 1
    elif change == "negative zero":
        changed[40] = -0.0
    else:
        changed = changed.roll(1)
    assert tensor_digest(changed) != tensor_digest(tensor)


def test_part_outside_is_refused() -> None:
    """A part that does not fit at its place is an error, not a wrong digest."""
    with pytest.raises(ValueError, match=r"part of shape \(2, 3\) at 3 along dimension 0 is outside of shape \(4, 3\)"):
        partial_digest(torch.zeros(2, 3), shape=(4, 3), offset=3)


def test_manifest_describes_each_tensor() -> None:
    """The manifest keeps the order, names dtypes in words, and its own digest ignores the order."""
    tensors = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.zeros(4)}
    manifest = manifest_of(tensors.items())
    assert [(t.name, t.shape, t.dtype) for t in manifest.tensors] == [("b", (2, 3), "bfloat16"), ("a", (4,), "float32")]
    assert manifest.digest == manifest_of(reversed(tensors.items())).digest
    assert manifest.digest != manifest_of({**tensors, "a": torch.ones(4)}.items()).digest
