"""Rollouts at their actual depth on real vLLM: the engines, policies and mutations that a short run affords.

Reference: an fp64 computation of the same trace (`tests/oracle.py`); between engines, bitwise equality. The whole
matrix is `python -m tests.contracts.depth.matrix` (make test-all).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.oracle import Oracle

from . import captured
from .checks import check_against_oracle, check_rows, differing, what_noticed
from .harness import COIN, MIXED, MUTATIONS, POLICIES, Outcome, rollouts

LAYERS, LOOPS = 3, 4


@pytest.fixture(scope="module")
def oracle(tiny_ouro: Path) -> Oracle:
    return Oracle(tiny_ouro)


@pytest.fixture(scope="module")
def plain(tiny_ouro: Path) -> dict[str, Outcome]:
    outcome = rollouts(tiny_ouro, "plain", (MIXED, "fixed:4", "fixed:2", "early:0.6:2:4"))
    assert isinstance(outcome, dict), outcome
    return outcome


def test_plain_rollouts_equal_the_oracle(plain: dict[str, Outcome], oracle: Oracle) -> None:
    """All policies in one batch: traces fit, score by trace is bitwise, log-probs within 2e-6 of fp64, rule obeyed."""
    rows = plain[MIXED].rows
    check_rows(rows, LOOPS)
    worst = check_against_oracle(rows, oracle)
    histogram = Counter(depth for row in rows for depth in row.loops[len(row.prompt) :])
    print(f"max {worst:.2e} over {sum(len(r.tokens) for r in rows)} tokens, depths {sorted(histogram.items())}")
    assert len(histogram) == LOOPS, "the policies did not mix depths; the test would show little"


def test_layers_run_only_for_tokens_that_need_them(plain: dict[str, Outcome]) -> None:
    """fixed:2 decodes with half the layer calls of fixed:4; early exit runs the sum of depths, not batch x max."""
    for policy in ("fixed:4", "fixed:2", "early:0.6:2:4"):
        outcome = plain[policy]
        # generation, then scoring of the same tokens by trace: every input token twice at its own depth
        expected = 2 * LAYERS * sum(sum(row.loops) for row in outcome.rows[: outcome.first_turn])
        assert outcome.layer_tokens == expected, (policy, outcome.layer_tokens, expected)
    depth = [d for r in plain["early:0.6:2:4"].rows for d in r.loops[len(r.prompt) :]]
    assert 2 in depth and max(depth) > 2, "early exit left no choice to count"


@pytest.mark.parametrize("engine", ["chunked", "all"])
def test_engines_agree_bitwise(plain: dict[str, Outcome], tiny_ouro: Path, oracle: Oracle, engine: str) -> None:
    """Chunked prefill, prefix cache and preemption change no token, depth or score, also for a second turn."""
    outcomes = rollouts(tiny_ouro, engine, (MIXED, COIN), repeat=engine == "all")
    assert isinstance(outcomes, dict), outcomes
    assert differing(outcomes[MIXED].rows, plain[MIXED].rows) == []
    if engine == "all":
        assert outcomes[MIXED].preempted > 0 and outcomes[MIXED].cached_tokens > 0, outcomes[MIXED]
        assert outcomes[COIN].preempted > 0
    check_rows(outcomes[COIN].rows, LOOPS)
    worst = check_against_oracle(outcomes[COIN].rows, oracle, rule=False)
    print(f"{engine}: preempted {outcomes[MIXED].preempted}, cached {outcomes[MIXED].cached_tokens}, coin {worst:.2e}")


CATCH: dict[str, tuple[str, str]] = {
    "no last-exited write": ("plain", "early:0.6:2:4"),
    "prompt recognised by step size": ("plain", "fixed:2"),
    "rows dropped inside a chunk": ("tiny", COIN),
    "trace ignored on recomputation": ("tiny", COIN),
    "cache cap removed": ("cache", "fixed:2"),
    "generator patch removed": ("chunked", "fixed:2"),
}


@pytest.mark.parametrize("mutation", CATCH)
def test_mutations_are_caught(plain: dict[str, Outcome], tiny_ouro: Path, oracle: Oracle, mutation: str) -> None:
    """Each mechanism, taken away, is noticed by the checks above."""
    assert CATCH.keys() == MUTATIONS.keys()
    engine, policy = CATCH[mutation]
    outcomes = rollouts(tiny_ouro, engine, (policy,), mutation=mutation)
    caught = what_noticed(outcomes, policy, plain, oracle)
    print(f"{mutation}: {str(caught)[:200]}")
    assert caught, f"{mutation!r} went unnoticed"
    assert "TimeoutError" not in str(caught)


@pytest.mark.parametrize("engine", ["plain", "all"])
def test_captured_steps_agree_bitwise(plain: dict[str, Outcome], tiny_ouro: Path, oracle: Oracle, engine: str) -> None:
    """Rows that left are passed over instead of dropped: no token, depth or score changes, in no policy."""
    name = f"{captured.__name__}:through_graphs"
    outcomes = rollouts(tiny_ouro, engine, (MIXED, "early:0.6:2:4", "fixed:2", COIN), mutation=name)
    assert isinstance(outcomes, dict), outcomes
    for policy in (MIXED, "early:0.6:2:4", "fixed:2"):
        assert differing(outcomes[policy].rows, plain[policy].rows) == []
    check_rows(outcomes[COIN].rows, LOOPS)
    check_against_oracle(outcomes[COIN].rows, oracle, rule=False)
    passed_over = outcomes["early:0.6:2:4"].layer_tokens - plain["early:0.6:2:4"].layer_tokens
    assert passed_over > 0, "the steps were not run as captured ones"


@pytest.mark.parametrize("mutation", captured.MUTATIONS)
def test_mutations_of_captured_steps_are_caught(
    plain: dict[str, Outcome], tiny_ouro: Path, oracle: Oracle, mutation: str
) -> None:
    outcomes = rollouts(tiny_ouro, "plain", ("early:0.6:2:4",), mutation=f"{captured.__name__}:{mutation}")
    assert what_noticed(outcomes, "early:0.6:2:4", plain, oracle), f"{mutation!r} went unnoticed"


def test_every_policy_is_in_the_matrix() -> None:
    """The mixed batch holds every policy, so the short run misses none of them."""
    from .harness import first_turn

    assert {r["execution"] for r in first_turn(MIXED)} == set(POLICIES)
