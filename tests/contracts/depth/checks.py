"""What every rollout must satisfy, whatever engine made it."""

from __future__ import annotations

from collections.abc import Sequence

from providers.ouro.trace import DepthPolicy
from tests.oracle import Oracle, rule_violation

from .harness import COIN, Outcome, Row

BOUND = 2e-6  # fp32 against fp64 at weights of std 0.02 and temperature 1; a temperature t divides the rounding by t


def check_rows(rows: Sequence[Row], num_loops: int) -> None:
    """Traces fit, prompts ran all loops, depths obey min and max, scoring by trace repeats generation bitwise."""
    for row in rows:
        policy = DepthPolicy.parse(row.execution, num_loops)
        assert len(row.loops) == len(row.prompt) + len(row.tokens) - 1, row.key
        assert set(row.loops[: len(row.prompt)]) == {num_loops}, f"{row.key}: a prompt token left early: {row.loops}"
        generated = row.loops[len(row.prompt) :]
        assert all(policy.min_loops <= d <= policy.max_loops for d in generated), (row.key, generated)
        assert row.scores == row.logprobs, f"{row.key}: score by trace differs from generation"


def check_against_oracle(rows: Sequence[Row], oracle: Oracle, *, rule: bool = True) -> float:
    """Largest difference of selected log-probs to fp64, at most BOUND; with `rule`, depths are what the rule says."""
    worst = 0.0
    for row in rows:
        sequence, loops = [*row.prompt, *row.tokens], list(row.loops)
        wanted = oracle.logprobs(sequence, loops, len(row.prompt), row.temperature)
        off = max(abs(a - b) for a, b in zip(wanted, row.logprobs, strict=True))
        worst = max(worst, off * row.temperature)
        assert worst <= BOUND, f"{row.key}: {worst:.2e} from fp64, expected at most {BOUND:.0e} (fp32 rounding)"
        if rule:
            check_rule(row, oracle)
    return worst


def check_rule(row: Row, oracle: Oracle) -> None:
    """Every generated token's depth is what the exit rule gives for an fp64 computation of the same trace."""
    policy = DepthPolicy.parse(row.execution, oracle.config["total_ut_steps"])
    _, chances = oracle.run([*row.prompt, *row.tokens][:-1], list(row.loops))
    for position in range(len(row.prompt), len(row.loops)):
        depth = row.loops[position]
        problem = rule_violation(
            chances[position].tolist(),
            depth,
            threshold=policy.threshold,
            low=policy.min_loops,
            high=policy.max_loops,
            delay=policy.delay,
        )
        assert problem is None, f"{row.key} position {position}: {problem}"


def differing(rows: Sequence[Row], reference: Sequence[Row]) -> list[str]:
    """Keys of rows that are not bitwise the reference's (tokens, scores, depths), or that it lacks."""
    by_key = {row.key: row for row in reference}
    return [f"{row.key}" for row in rows if by_key.get(row.key) != row]


def what_noticed(
    got: dict[str, Outcome] | str, policy: str, reference: dict[str, Outcome], oracle: Oracle
) -> str | None:
    """What in the checks notices that these outcomes are wrong; None if nothing does."""
    if isinstance(got, str):
        return got
    rows = got[policy].rows
    try:
        check_rows(rows, oracle.config["total_ut_steps"])
        check_against_oracle(rows, oracle, rule=policy != COIN)
    except AssertionError as error:
        return str(error)
    wrong = differing(rows, reference[policy].rows) if policy in reference else []
    return f"rows differ: {wrong[:3]}" if wrong else None
