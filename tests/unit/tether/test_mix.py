"""Prompts of several files by their weights, in an order that follows from seed and position alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tether.data import PromptOrder
from tether.mix import PromptMix, parse_files


def test_one_file_is_the_plain_order() -> None:
    """A run with one file takes what PromptOrder takes."""
    assert PromptMix([7], [1.0], seed=3).take(0, 40) == PromptOrder(7, seed=3).take(0, 40)


def test_every_stretch_has_its_shares() -> None:
    """Counts are never further than one from the weights' shares, and each file's epochs are whole."""
    mix = PromptMix([10, 4, 5], [1.0, 2.0, 0.5], seed=1).take(0, 700)
    sources = [0 if i < 10 else 1 if i < 14 else 2 for i in mix]
    for length in range(1, 701):
        for source, share in ((0, 2 / 7), (1, 4 / 7), (2, 1 / 7)):
            assert abs(sources[:length].count(source) - share * length) <= 1
    second = [i for i in mix if 10 <= i < 14]
    assert all(sorted(second[e : e + 4]) == [10, 11, 12, 13] for e in range(0, len(second) - 3, 4))
    assert len({tuple(second[e : e + 4]) for e in range(0, 80, 4)}) > 5, "every epoch has an order of its own"


def test_any_position_can_be_taken_up_again() -> None:
    """In steps, from the middle, and backwards: always the same prompts."""
    whole = PromptMix([6, 9], [3.0, 1.0], seed=2).take(0, 100)
    again = PromptMix([6, 9], [3.0, 1.0], seed=2)
    assert again.take(41, 7) == whole[41:48] and again.take(48, 10) == whole[48:58] and again.take(3, 5) == whole[3:8]
    assert PromptMix([6, 9], [3.0, 1.0], seed=4).take(0, 100) != whole


def test_the_setting_is_checked() -> None:
    """FILE:WEIGHT, several with commas."""
    assert parse_files("a.jsonl:0.5,b:c.jsonl:2") == [(Path("a.jsonl"), 0.5), (Path("b:c.jsonl"), 2.0)]
    assert parse_files("") == []
    for text in ("a.jsonl", "a.jsonl:0", "a.jsonl:x", ":1"):
        with pytest.raises(ValueError, match="more_data: got"):
            parse_files(text)
