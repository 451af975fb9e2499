"""Reward functions and how one is found by name.

A reward function is called once per sample as
`reward(*, prompt, response, response_token_ids, label, metadata) -> float`: the prompt as the data file has it, the
decoded response without special tokens, its token ids, and the record's label and metadata. It must not depend on
anything else, or a resumed run differs from a continuous one.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def load_reward(name: str) -> RewardFunction:
    """The function that "module:function" names.

    Raises:
        ValueError: the module cannot be imported, has no such function, or the function takes no keyword arguments.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward {name!r}: cannot import {module_name!r} ({error}); is it on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward {name!r}: {module_name} has no function {function_name!r}")
    try:
        inspect.signature(function).bind(prompt="", response="", response_token_ids=[], label="", metadata=None)
    except TypeError as error:
        raise ValueError(
            f"reward {name!r}: {error}; expected a signature of "
            "(*, prompt, response, response_token_ids, label, metadata) -> float"
        ) from error
    return function


def source_of(function: RewardFunction) -> bytes:
    """What the run contract digests for a reward: the file that defines it."""
    path = inspect.getsourcefile(inspect.unwrap(function))
    return Path(path).read_bytes() if path else repr(function).encode()


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
