"""Reward functions: the two that are shipped, how one is found, and what a bad one says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tether.functions import source_of
from tether.rewards import checked_reward, exact_match, last_number_match, load_reward, math_equal


def call(function: Any, response: str, label: Any) -> float:
    return function(prompt="", response=response, response_token_ids=[1], label=label, metadata=None)


def test_exact_match_ignores_only_spaces_at_the_ends() -> None:
    """1 for the label, 0 for anything else."""
    assert call(exact_match, " 2 5 7\n", "2 5 7") == 1
    assert call(exact_match, "2 5 7 8", "2 5 7") == 0
    assert call(exact_match, "7", 7) == 1


@pytest.mark.parametrize(
    ("response", "label", "want"),
    [
        ("so it is 1,234.", "#### 1234", 1),
        ("3 apples and 4 make 7", "7", 1),
        ("-3.50", -3.5, 1),
        ("7 or 8", "7", 0),
        ("none", "7", 0),
        ("none", "none", 0),
    ],
)
def test_last_number_match_compares_last_numbers(response: str, label: Any, want: float) -> None:
    """The last number counts, commas aside; no number is never right."""
    assert call(last_number_match, response, label) == want


@pytest.mark.parametrize(
    ("response", "label", "want"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1),
        (r"The answer is $1 + x^2$.", "x^2+1", 1),
        ("I get 1,234", 1234, 1),
        (r"\boxed{3}", "4", 0),
        ("I do not know", "4", 0),
    ],
)
def test_math_equal_compares_meanings(response: str, label: Any, want: float) -> None:
    """The same number or expression in another form is right."""
    assert call(math_equal, response, label) == want


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("tether.rewards:nothing", "has no function 'nothing'"),
        ("math:sqrt", "expected a signature of"),
    ],
)
def test_unusable_names_are_refused(name: str, message: str) -> None:
    """A reward that cannot work is refused before any model loads."""
    with pytest.raises(ValueError) as refused:
        load_reward(name)
    assert message in str(refused.value)


def test_a_named_function_is_found_and_its_source_is_the_digested_file() -> None:
    """The run contract notices an edited reward."""
    assert load_reward("tether.rewards:exact_match") is exact_match
    assert b"def exact_match" in source_of(exact_match)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "high"])
def test_rewards_that_are_not_finite_numbers_name_the_sample(value: Any) -> None:
    """A NaN reward would poison every parameter."""
    with pytest.raises(ValueError) as refused:
        checked_reward(lambda **_: value, where="update-1/prompt-0/sample-3", response="r", label="l")
    assert "update-1/prompt-0/sample-3" in str(refused.value) and repr(value) in str(refused.value)


def test_a_raising_reward_names_the_sample_and_the_error() -> None:
    """The traceback alone would not say which sample broke it."""
    with pytest.raises(RuntimeError) as failed:
        checked_reward(lambda *, response, **_: 1 / 0, where="sample-3", response="r")
    assert "sample-3: the reward function raised ZeroDivisionError" in str(failed.value)
    assert checked_reward(lambda **_: True, where="s") == 1.0
