"""Trainer and engine compute the same: selected log-probs at every depth, in fp32 and bf16, against a yardstick.

fp32, std 0.02: at most 2e-6 apart (temperature 1). Elsewhere: max <= 3x and mean <= 2x of the trainer's own rounding
error on the same sequences (fp32 against fp64, bf16 against fp32), and a wrong replay must break the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.hf_convert.directory import HFDirectory
from providers.ouro.config import OuroConfig
from tests.contracts.depth.harness import MIXED, POLICIES, Row, rollouts
from tests.oracle import Oracle
from tests.tiny import write_ouro

pytestmark = pytest.mark.usefixtures("megatron")
BOUND, LOOPS = 2e-6, 4


def trainer_for(path: Path, dtype: torch.dtype) -> Any:
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer
    from providers.ouro.model import build

    directory = HFDirectory(path)
    model = build(OuroConfig.from_hf(directory.config), dtype=dtype)
    trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-4), tokens_per_microbatch=700)
    trainer.load_hf(directory)
    return trainer


def trainer_logprobs(trainer: Any, rows: Sequence[Row], loops: Callable[[Row], Sequence[int]]) -> list[list[float]]:
    from adapters.megatron.packing import TrainSample

    samples = [
        TrainSample(
            prompt_token_ids=row.prompt,
            response_token_ids=row.tokens,
            trace=torch.tensor(loops(row)),
            temperature=row.temperature,
        )
        for row in rows
    ]
    return trainer.score(samples)


def recorded(row: Row) -> Sequence[int]:
    return row.loops


def uniform(row: Row) -> Sequence[int]:
    return [LOOPS] * len(row.loops)


def differences(rows: Sequence[Row], scores: Sequence[Sequence[float]]) -> list[float]:
    """|trainer - engine| of every response token, times the temperature (which divides both sides' rounding)."""
    return [
        abs(a - b) * row.temperature
        for row, own in zip(rows, scores, strict=True)
        for a, b in zip(own, row.logprobs, strict=True)
    ]


def summary(values: Sequence[float]) -> str:
    first = ", ".join(f"{v:.1e}" for v in values[:5])
    return f"max {max(values):.2e} mean {sum(values) / len(values):.2e} count {len(values)} first {first}"


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
    oracle = Oracle(path, torch.float64 if dtype == torch.float32 else torch.float32)
    exact = [oracle.logprobs([*r.prompt, *r.tokens], list(r.loops), len(r.prompt), r.temperature) for r in rows]
    own = [
        abs(a - b) * row.temperature
        for row, wide, narrow in zip(rows, exact, scores, strict=True)
        for a, b in zip(wide, narrow, strict=True)
    ]
    off = differences(rows, scores)
    print(f"trainer against engine: {summary(off)}\ntrainer against wider:  {summary(own)}")
    assert within(off, own), "engine and trainer differ by more than rounding"
    wrong = differences(rows, trainer_logprobs(trainer_for(path, dtype), rows, uniform))
    assert not within(wrong, own), "the bound would let a wrong replay pass"


def within(off: Sequence[float], own: Sequence[float]) -> bool:
    """DESIGN's yardstick: max <= 3x and mean <= 2x of the trainer's own rounding error."""
    return max(off) <= 3 * max(own) and math.fsum(off) <= 2 * math.fsum(own)


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-Core on this process alone."""
    from adapters.megatron import cpu_runtime
    from adapters.megatron.runtime import RuntimeSettings, initialize, shutdown

    initialize(RuntimeSettings(seed=7))
    yield
    shutdown()
    cpu_runtime.uninstall()
