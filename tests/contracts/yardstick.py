"""Scores by the trainer of what an engine generated, and DESIGN's yardstick for how far the two may be apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.hf_convert.directory import HFDirectory
from providers.ouro.config import OuroConfig
from tests.contracts.depth.harness import Row
from tests.oracle import Oracle

LOOPS = 4


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


def rounding_of(path: Path, dtype: torch.dtype, rows: Sequence[Row], scores: Sequence[Sequence[float]]) -> list[float]:
    """The trainer's own rounding error: its scores against a wider computation of the same traces."""
    oracle = Oracle(path, torch.float64 if dtype == torch.float32 else torch.float32)
    exact = [oracle.logprobs([*r.prompt, *r.tokens], list(r.loops), len(r.prompt), r.temperature) for r in rows]
    return [
        abs(a - b) * row.temperature
        for row, wide, narrow in zip(rows, exact, scores, strict=True)
        for a, b in zip(wide, narrow, strict=True)
    ]


def within(off: Sequence[float], own: Sequence[float]) -> bool:
    """DESIGN's yardstick: max <= 3x and mean <= 2x of the trainer's own rounding error."""
    return max(off) <= 3 * max(own) and math.fsum(off) <= 2 * math.fsum(own)
