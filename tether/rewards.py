"""Reward functions and how one is found by name.

A reward function is called once per sample as
`reward(*, prompt, response, response_token_ids, label, metadata) -> float`: the prompt as the data file has it, the
decoded response without special tokens, its token ids, and the record's label and metadata. It must not depend on
anything else, or a resumed run differs from a continuous one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from tether.functions import function_named

RewardFunction = Callable[..., float]
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_match(*, response: str, label: Any, **_: Any) -> float:
    """1 if the response is the label, spaces at both ends aside; else 0."""
    return float(response.strip() == str(label).strip())


def last_number_match(*, response: str, label: Any, **_: Any) -> float:
    """1 if the last number in the response equals the last number in the label (thousands commas aside); else 0.

    The label may be a whole GSM8K answer: its number is the last one, after "####".
    """
    got, want = _last_number(response), _last_number(str(label))
    return float(got is not None and got == want)


def math_equal(*, response: str, label: Any, **_: Any) -> float:
    """1 if math-verify finds the response's last formula or number equal to the label's, in whatever form; else 0.

    The label may be LaTeX, an expression or a number.
    """
    from math_verify import parse, verify

    want, got = parse(f"${label}$") or parse(str(label)), parse(response)
    return float(bool(got) and bool(want) and verify(want, got))


def load_reward(name: str) -> RewardFunction:
    """The function that "module:function" names. Raises ValueError if none is there that can be called as a reward."""
    return function_named(
        name,
        what="reward",
        signature="(*, prompt, response, response_token_ids, label, metadata) -> float",
        prompt="",
        response="",
        response_token_ids=[],
        label="",
        metadata=None,
    )


def checked_reward(function: RewardFunction, *, where: str, **sample: Any) -> float:
    """One sample's reward.

    Raises:
        RuntimeError: the function raised; names the sample by `where`.
        ValueError: it returned something that is not a finite number.
    """
    try:
        value = function(**sample)
    except Exception as error:
        raise RuntimeError(f"{where}: the reward function raised {type(error).__name__}: {error}") from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{where}: the reward function returned {value!r}, expected a finite number; "
            f"response {sample.get('response')!r}, label {sample.get('label')!r}"
        )
    return number


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
