"""The meaning of an OLMoE trace: what is accepted, what is refused, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.contract import Trace
from providers.olmoe import trace
from providers.olmoe.config import OlmoeConfig
from tests.tiny import OLMOE_CONFIG

CONFIG = OlmoeConfig.from_hf(OLMOE_CONFIG)


def rows(tokens: int = 4) -> np.ndarray:
    generator = np.random.default_rng(0)
    picks = [[generator.permutation(8)[:2] for _ in range(2)] for _ in range(tokens)]
    return np.array(picks, np.uint8)


def read(made: Trace | None) -> np.ndarray:
    return trace.rows_of(made, num_prompt_tokens=2, num_tokens=5, config=CONFIG, where="sample 7")


def test_there_and_back() -> None:
    """What was recorded is what is read; counts are per layer and expert."""
    made = rows()
    assert (read(trace.to_trace(made)) == made).all()
    counts = trace.load_per_expert([made, made], CONFIG)
    assert counts.shape == (2, 8) and counts.sum() == 2 * 4 * 2 * 2
    assert counts[1, made[0, 1, 0]] >= 2


def changed(position: tuple[int, int, int], value: int) -> Trace:
    bad = rows()
    bad[position] = value
    return trace.to_trace(bad)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "no trace"),
        (Trace("loops", (4,), b"\4" * 4), "a trace of 'loops'"),
        (trace.to_trace(rows(3)), r"shape \(3, 2, 2\), expected \(4, 2, 2\)"),
        (changed((2, 1, 0), 8), "position 2, layer 1: got expert 8, expected numbers in 0 .. 7"),
        (changed((3, 0, 1), trace.UNKNOWN), "position 3, layer 0: no experts were recorded"),
        (changed((1, 0, 0), int(rows()[1, 0, 1])), "position 1, layer 0: got experts .* expected no one twice"),
    ],
)
def test_refuses_what_cannot_be_replayed(made: Trace | None, words: str) -> None:
    """An unrecorded row never reaches the trainer; the sample and the place are named."""
    with pytest.raises(ValueError, match=f"sample 7: .*{words}"):
        read(made)


def test_the_only_policy_is_full() -> None:
    """An OLMoE has no depth to choose."""
    assert trace.parse_policy("full", CONFIG) == "full"
    with pytest.raises(ValueError, match="got 'fixed:2', expected full"):
        trace.parse_policy("fixed:2", CONFIG)
