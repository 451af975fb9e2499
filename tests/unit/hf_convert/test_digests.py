"""Many digests at once are those of one tensor after the other, whichever thread computes them."""

from __future__ import annotations

import os

import pytest
import torch

from adapters import threads
from adapters.hf_convert.blocks import Blocks
from adapters.hf_convert.digest import copy_without_negative_zeros, finite_digest, partial_digest, tensor_digest
from adapters.hf_convert.digests import Part, copies_without_negative_zeros, finite_digests, partial_digests

SHAPES = ((), (1,), (3, 0), (7, 5), (2, 3, 4), (2000, 1100))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(autouse=True)
def _several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the smallest tensors, and where there is one core."""
    monkeypatch.setattr(threads, "WORTH_THREADS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [(torch.randn(shape, generator=generator) * 50).to(dtype) for shape in SHAPES for dtype in DTYPES]
    for tensor in made:
        tensor.view(-1)[1::3] = -0.0
    return made


def test_digests_and_what_is_not_finite() -> None:
    given = tensors()
    given[3].fill_(float("inf"))
    given[-3][-1, -1] = float("nan")
    found = finite_digests(given)
    assert found == [finite_digest(tensor) for tensor in given]
    assert [i for i, (_, is_finite) in enumerate(found) if not is_finite] == [3, len(given) - 3]


def test_parts() -> None:
    """Along every dimension, and of blocks."""
    parts = []
    for tensor in tensors():
        for dim, size in enumerate(tensor.shape):
            cut = size // 3
            parts += [
                Part(tensor=tensor.narrow(dim, start, length), shape=tuple(tensor.shape), dim=dim, offset=start)
                for start, length in ((0, cut), (cut, size - cut))
            ]
    blocks = Blocks(torch.randn(4, 6, 8))
    parts.append(Part(tensor=blocks, shape=(32, 12), dim=1, offset=6))
    expected = [partial_digest(p.tensor, shape=p.shape, dim=p.dim, offset=p.offset) for p in parts]
    assert partial_digests(parts) == expected
    assert len(set(expected)) > len(expected) // 2
    with pytest.raises(ValueError, match="outside"):
        partial_digests([Part(tensor=torch.zeros(3), shape=(4,), offset=2)])


def test_copies() -> None:
    given = tensors()
    targets = [torch.full_like(tensor, 3) for tensor in given]
    expected = [torch.empty_like(tensor) for tensor in given]
    digests = [copy_without_negative_zeros(*pair) for pair in zip(given, expected, strict=True)]
    assert copies_without_negative_zeros(list(zip(given, targets, strict=True))) == digests
    for target, wanted in zip(targets, expected, strict=True):
        assert tensor_digest(target) == tensor_digest(wanted)
    assert copies_without_negative_zeros(list(zip(targets, targets, strict=True))) == digests  # in place


def test_an_error_in_a_thread_is_raised() -> None:
    def fail(item: int) -> int:
        if item == 2:
            raise RuntimeError("two")
        return item

    assert threads.spread(str, [3, 1, 2], sizes=[1, 5, 2]) == ["3", "1", "2"]
    with pytest.raises(RuntimeError, match="two"):
        threads.spread(fail, [0, 1, 2, 3], sizes=[1, 1, 1, 1])
