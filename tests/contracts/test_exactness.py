"""Trainer and engine compute the same: selected log-probs at every depth, in fp32 and bf16, against a yardstick.

fp32, std 0.02: at most 2e-6 apart (temperature 1). Elsewhere: max <= 3x and mean <= 2x of the trainer's own rounding
error on the same sequences (fp32 against fp64, bf16 against fp32), and a wrong replay must break the bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.depth.harness import MIXED, POLICIES, Row, rollouts
from tests.contracts.yardstick import (
    LOOPS,
    differences,
    recorded,
    rounding_of,
    summary,
    trainer_for,
    trainer_logprobs,
    uniform,
    within,
)
from tests.tiny import write_ouro

pytestmark = pytest.mark.usefixtures("megatron")
BOUND = 2e-6


@pytest.fixture(scope="module")
def rows(tiny_ouro: Path) -> list[Row]:
    outcomes = rollouts(tiny_ouro, "plain", (MIXED,))
    assert isinstance(outcomes, dict), outcomes
    return outcomes[MIXED].rows


@pytest.fixture(scope="module")
def trainer(tiny_ouro: Path, megatron: None) -> Any:
    return trainer_for(tiny_ouro, torch.float32)


@pytest.mark.parametrize("policy", POLICIES)
def test_trainer_equals_engine_at_every_depth(rows: list[Row], trainer: Any, policy: str) -> None:
    """fp32, std 0.02: replaying the trace, at most 2e-6; replayed at uniform depth, 100 times that where depths mix."""
    chosen = [row for row in rows if row.execution == policy]
    off = differences(chosen, trainer_logprobs(trainer, chosen, recorded))
    flat = differences(chosen, trainer_logprobs(trainer, chosen, uniform))
    depths = [d for row in chosen for d in row.loops[len(row.prompt) :]]
    print(
        f"{policy}: {summary(off)}; uniform depth max {max(flat):.1e}; depths", [depths.count(d) for d in range(1, 5)]
    )
    assert max(off) <= BOUND, "fp32 rounding of two correct programs at std 0.02"
    if set(depths) != {LOOPS}:
        assert max(flat) >= 100 * max(off), "a replay that ignores the trace must be seen"


@pytest.mark.parametrize(("std", "dtype"), [(0.15, torch.float32), (0.02, torch.bfloat16)], ids=["hot-fp32", "bf16"])
def test_yardstick(tmp_path: Path, std: float, dtype: torch.dtype) -> None:
    """Where rounding is larger, trainer and engine differ by no more than the trainer from a wider computation."""
    path = write_ouro(tmp_path / "model", std=std, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    outcomes = rollouts(path, "plain", (MIXED,), dtype=name)
    assert isinstance(outcomes, dict), outcomes
    rows = outcomes[MIXED].rows
    scores = trainer_logprobs(trainer_for(path, dtype), rows, recorded)
    own, off = rounding_of(path, dtype, rows, scores), differences(rows, scores)
    print(f"trainer against engine: {summary(off)}\ntrainer against wider:  {summary(own)}")
    assert within(off, own), "engine and trainer differ by more than rounding"
    wrong = differences(rows, trainer_logprobs(trainer_for(path, dtype), rows, uniform))
    assert not within(wrong, own), "the bound would let a wrong replay pass"
