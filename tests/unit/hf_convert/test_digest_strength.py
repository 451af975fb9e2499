"""That the digest tells apart what differs in a regular way, as often as 64 random bits would.

No two of many thousand tensors of a family may share a digest, and its lower, middle and upper 32 bits may be shared
only about as often as those of random numbers are.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from adapters.hf_convert import digest

PLACE = 0xD1B54A33
"""By which the first key grows from element to element."""


def digests_of(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[tensors, elements] integers -> [tensors], those of `partial_digest`."""
    return torch.cat([digest._products(part, places).sum(1) for part in words.split(4096)])


def assert_as_random(digests: torch.Tensor) -> None:
    """Of n random numbers of 32 bits, n * n / 2**33 pairs are equal."""
    count = len(digests)
    assert len(digests.unique()) == count
    for shift in (0, 16, 32):
        window = digests >> shift & 0xFFFFFFFF
        assert count - len(window.unique()) <= count * count / 2**33 * 2 + 5, f"bits from {shift}"


def places(count: int, step: int = 1) -> torch.Tensor:
    return torch.arange(1, count + 1) * step


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


BASES = {
    "numbers in steps": bits(torch.arange(360.0)),
    "bits in steps": torch.arange(360),
    "one key": -places(360) * PLACE % 2**32,  # what is mixed is 0 everywhere
    "normal": bits(torch.randn(360, generator=torch.Generator().manual_seed(0)).bfloat16()),
}


@pytest.mark.parametrize("step", [1, 1024, 1 << 16, 1 << 31])
@pytest.mark.parametrize("name", BASES)
def test_two_exchanged_elements(name: str, step: int) -> None:
    """All pairs of 360 elements, that lie together or far apart."""
    base, at = BASES[name], places(360, step)
    i, j = torch.combinations(torch.arange(360)).T
    products = digest._products(base[:, None].expand(-1, 360), at)  # [element, place]
    change = products[j, i] + products[i, j] - products[i, i] - products[j, j]
    differs = base[i] != base[j]
    assert_as_random(change[differs])
    assert (change[~differs] == 0).all()


def test_constants() -> None:
    """64 equal elements, of every number of 16 bits: each changes all elements by the same."""
    assert_as_random(digests_of(torch.arange(-(2**15), 2**15)[:, None].expand(-1, 64), places(64)))


def test_one_element_of_every_value() -> None:
    """Its low half alone tells all values apart."""
    found = digests_of(torch.arange(-(2**15), 2**15)[:, None], places(1))
    assert len((found & 0xFFFFFFFF).unique()) == 2**16


@pytest.mark.parametrize("mask", [1 << 31, 1 << 23, 1, 0x80008000])
def test_flips_of_the_same_bits(mask: int) -> None:
    """A sign, an exponent or a last bit of any subset of 16 elements, as -0.0 for 0.0."""
    chosen = torch.arange(2**16)[:, None] >> torch.arange(16) & 1
    for base in (torch.zeros(16, dtype=torch.int64), bits(torch.linspace(1, 2, 16)).long()):
        assert_as_random(digests_of(base ^ chosen * mask, places(16)))


@pytest.mark.parametrize("value", [1, 0x3F80, 0x3F800000])
def test_a_block_that_is_elsewhere_or_longer(value: int) -> None:
    """Ones among zeros, in every run of 200 elements."""
    begin, end = torch.combinations(torch.arange(201)).T
    at = torch.arange(200)
    runs = (at >= begin[:, None]) & (at < end[:, None])
    assert_as_random(digests_of(runs * value, places(200)))


@pytest.mark.parametrize("name", BASES)
def test_shards_in_another_order(name: str) -> None:
    """8 shards of 40 elements, in all orders."""
    shards = BASES[name][:320].view(8, 40)
    products = torch.stack([digest._products(shards, places(320)[40 * p : 40 * p + 40]).sum(1) for p in range(8)])
    orders = torch.tensor(list(itertools.permutations(range(8))))
    assert_as_random(products[torch.arange(8), orders].sum(1))


def test_rolled() -> None:
    """A tensor of normal numbers, turned by any number of elements."""
    doubled = bits(torch.randn(2048, generator=torch.Generator().manual_seed(0)).bfloat16()).repeat(2)
    assert_as_random(digests_of(doubled.unfold(0, 2048, 1)[:2048], places(2048)))


def test_exchanges_that_one_key_would_not_see() -> None:
    """Elements a, b, c, d at i, j, i + s, j + s, exchanged (i, j) and (i + s, j + s), where a - d = b - c = s * PLACE:
    with n * PLACE as the only key, the same four words would be mixed before and after."""
    count, generator = 1 << 16, torch.Generator().manual_seed(0)
    i, j, s = torch.randint(1, 1 << 30, (3, count), generator=generator)
    c, d = torch.randint(0, 1 << 32, (2, count), generator=generator)
    a, b = ((x + s * PLACE) % 2**32 for x in (d, c))
    at = torch.stack([i, j, i + s, j + s])
    before, after = torch.stack([a, b, c, d]), torch.stack([b, a, d, c])
    keys = [(words + at * PLACE) % 2**32 for words in (before, after)]
    assert torch.equal(keys[0].sort(0).values, keys[1].sort(0).values)
    assert_as_random((digest._products(before, at) - digest._products(after, at)).sum(0))


@pytest.mark.parametrize(("elements", "times"), [(1, 0.0), (2, 1.25), (3, 1.02)])
@pytest.mark.parametrize("width", [8, 10])
def test_what_goes_unseen_of_all_changes(width: int, elements: int, times: float) -> None:
    """The same products of words of `width` bits: of all changes of some elements, so many times 2**(-2 * width) keep
    the sum of 2 * width bits. Counted exactly, by the convolution of what a change of one element adds."""
    words, size = np.arange(1 << width), 1 << 2 * width

    def spectrum(place: int) -> np.ndarray:
        key = 2 * (place * 0xABC98389 % 2**32 >> 33 - width) + 1
        sums = np.bincount(words * (2 * words % (1 << width) ^ key), minlength=size)
        return np.abs(np.fft.fft(sums)) ** 2 / 4**width

    chosen = list(itertools.combinations([spectrum(place) for place in (1, 2, 3, 100, 12345)], elements))
    kept = np.mean([np.prod(spectra, axis=0).mean() for spectra in chosen])  # of pairs (before, after), equal or not
    assert (kept - 2.0 ** (-width * elements)) * size <= times + 1e-6
