"""Reward functions that fail in every way there is, by what the response says. For `test_reward_process`."""

from __future__ import annotations

import os
import time
from typing import Any


def by_word(*, response: str, label: Any, **_: Any) -> Any:
    """What the response asks for."""
    print("a reward function may print", flush=True)
    if response == "raise":
        raise KeyError("no such answer")
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os._exit(3)
    if response == "nan":
        return float("nan")
    return float(response == label)


def always(**_: Any) -> float:
    raise RuntimeError("broken")
