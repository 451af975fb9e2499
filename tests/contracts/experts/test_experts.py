"""Routing on real vLLM: what is captured is what ran, in every engine configuration, and the trainer replays it.

Reference: transformers in fp64, forced to the recorded experts. fp32, std 0.02: at most 2e-6 apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.depth.harness import Outcome, Row, rollouts
from tests.unit.olmoe import reference

BOUND = 2e-6
FULL = "full"
MUTATIONS = "tests.contracts.experts.mutations"


def experts_of(row: Row) -> torch.Tensor:
    """[inputs, layers, top_k] of the tiny model."""
    return torch.tensor(row.loops).view(-1, 2, 2)


def summary(values: Sequence[float]) -> str:
    return f"max {max(values):.2e} mean {sum(values) / len(values):.2e} count {len(values)}"


def apart(rows: Sequence[Row], scores: Sequence[Sequence[float]]) -> list[float]:
    """|other - engine| of every response token, times the temperature (which divides both sides' rounding)."""
    pairs = zip(rows, scores, strict=True)
    return [abs(a - b) * row.temperature for row, own in pairs for a, b in zip(own, row.logprobs, strict=True)]


def from_oracle(oracle: Any, rows: Sequence[Row]) -> list[float]:
    """Differences from fp64 with the recorded experts."""
    scores = []
    with torch.no_grad():
        for row in rows:
            tokens = [*row.prompt, *row.tokens]
            logits, _ = reference.run(oracle, tokens[:-1], experts_of(row))
            values = (logits / row.temperature).log_softmax(-1)[len(row.prompt) - 1 :]
            scores.append(values.gather(1, torch.tensor(row.tokens)[:, None])[:, 0].tolist())
    return apart(rows, scores)


def check(rows: Sequence[Row], oracle: Any) -> list[float]:
    """Traces have a row per input, scores by trace repeat generation, and fp64 with these experts agrees."""
    for row in rows:
        assert len(experts_of(row)) == len(row.prompt) + len(row.tokens) - 1, row.key
        again = max(abs(a - b) for a, b in zip(row.scores, row.logprobs, strict=True))
        assert again <= BOUND / row.temperature, f"{row.key}: score by trace is {again:.2e} from generation"
    off = from_oracle(oracle, rows)
    assert max(off) <= BOUND, f"{max(off):.2e} from fp64, expected {BOUND:.0e} (fp32 rounding)"
    return off


def made(outcome: dict[str, Outcome] | str) -> Outcome:
    assert isinstance(outcome, dict), outcome
    return outcome[FULL]


@pytest.fixture(scope="module")
def oracle(tiny_olmoe: Path) -> Any:
    return reference.load(tiny_olmoe, torch.float64)


@pytest.fixture(scope="module")
def plain(tiny_olmoe: Path) -> Outcome:
    return made(rollouts(tiny_olmoe, "plain", (FULL,)))


@pytest.fixture(scope="module")
def by_chance(tiny_olmoe: Path) -> Outcome:
    return made(rollouts(tiny_olmoe, "all", (FULL,), repeat=True, mutation=f"{MUTATIONS}:coin_delivered_late"))


def test_captured_experts_are_those_of_the_model(plain: Outcome, oracle: Any) -> None:
    """Prompt and generated rows: the same sets as transformers' own routing in fp64; log-probs within 2e-6."""
    print(summary(check(plain.rows, oracle)))
    rows = 0
    for row in plain.rows[: plain.first_turn]:
        own = reference.routing(oracle, [*row.prompt, *row.tokens][:-1])
        assert torch.equal(own.sort(-1).values, experts_of(row).sort(-1).values), row.key
        rows += len(own)
    print(f"{rows} rows")


@pytest.mark.parametrize("engine", ["all", "wide"])
def test_engines_agree(plain: Outcome, tiny_olmoe: Path, oracle: Any, engine: str) -> None:
    """Chunked prefill, prefix cache and preemption, and prefixes shared within a step, change no token and no row."""
    outcome = made(rollouts(tiny_olmoe, engine, (FULL,), repeat=engine == "all"))
    assert outcome.cached_tokens > 0 and (outcome.preempted > 0 or engine != "all")
    by_key = {row.key: row for row in plain.rows}
    for row in outcome.rows:
        same = by_key[row.key]
        assert (row.tokens, row.loops) == (same.tokens, same.loops), row.key
    print(f"preempted {outcome.preempted}, cached {outcome.cached_tokens}, {summary(check(outcome.rows, oracle))}")


def test_records_are_followed_and_cached_prefixes_keep_theirs(by_chance: Outcome, oracle: Any) -> None:
    """With routers that choose by chance, in the engine that chunks, caches and preempts, where what ran is told later
    than it is asked for: the trace is what ran."""
    assert by_chance.preempted > 0 and by_chance.cached_tokens > 0
    off = check(by_chance.rows, oracle)
    print(f"preempted {by_chance.preempted}, cached {by_chance.cached_tokens}, {summary(off)}")


@pytest.mark.slow
def test_prefixes_that_have_not_come_are_waited_for(tiny_olmoe: Path, oracle: Any) -> None:
    """Prefixes that are found in the step that computes them, as late as above."""
    outcome = made(rollouts(tiny_olmoe, "wide", (FULL,), repeat=True, mutation=f"{MUTATIONS}:coin_delivered_late"))
    assert outcome.cached_tokens > 0
    print(f"cached {outcome.cached_tokens}, {summary(check(outcome.rows, oracle))}")


CATCH = {
    "coin_without_replay": "all",
    "late_without_waiting": "wide",
    "coin_with_rows_of_other_slots": "cache",
    "coin_without_cache_rows": "cache",
    "coin_with_layers_exchanged": "plain",
}


@pytest.mark.parametrize(
    "mutation", [pytest.param(name, marks=() if CATCH[name] == "plain" else pytest.mark.slow) for name in CATCH]
)
def test_mutations_are_caught(tiny_olmoe: Path, oracle: Any, mutation: str) -> None:
    """Each mechanism, taken away, is noticed by the checks above, or stops the engine."""
    outcome = rollouts(
        tiny_olmoe, CATCH[mutation], (FULL,), repeat=CATCH[mutation] != "plain", mutation=f"{MUTATIONS}:{mutation}"
    )
    if isinstance(outcome, str):
        caught = outcome
    else:
        with pytest.raises(AssertionError) as error:
            check(outcome[FULL].rows, oracle)
        caught = str(error.value)
    print(f"{mutation}: {caught[:150]}")
    assert "TimeoutError" not in caught


def trainer_scores(path: Path, dtype: torch.dtype, rows: Sequence[Row], *, replay: bool) -> list[list[float]]:
    from adapters.megatron.packing import TrainSample
    from tests.unit.olmoe.ranks import make_trainer

    trainer = make_trainer(path, dtype=dtype)
    trainer.tokens_per_microbatch = 700
    return trainer.score(
        [
            TrainSample(
                prompt_token_ids=row.prompt,
                response_token_ids=row.tokens,
                trace=experts_of(row) if replay else None,
                temperature=row.temperature,
            )
            for row in rows
        ]
    )


@pytest.mark.usefixtures("megatron")
def test_trainer_equals_engine(tiny_olmoe: Path, plain: Outcome, by_chance: Outcome) -> None:
    """fp32: at most 2e-6 with replay, whatever the router does; a router by chance is 100 times off without."""
    for name, rows in (("as trained", plain.rows), ("by chance", by_chance.rows)):
        replayed, live = (
            apart(rows, trainer_scores(tiny_olmoe, torch.float32, rows, replay=replay)) for replay in (True, False)
        )
        print(f"{name}: replayed {summary(replayed)}; routed anew {summary(live)}")
        assert max(replayed) <= BOUND, "fp32 rounding at std 0.02"
    assert max(live) > 100 * BOUND, "replay would prove nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
def test_trainer_and_engine_in_bf16(tiny_olmoe: Path) -> None:
    """bf16: within DESIGN's yardstick, max <= 3x and mean <= 2x of the trainer's own bf16 error on these sequences."""
    rows = made(rollouts(tiny_olmoe, "plain", (FULL,), dtype="bfloat16")).rows
    wide, narrow, live = (
        trainer_scores(tiny_olmoe, dtype, rows, replay=replay)
        for dtype, replay in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False))
    )
    own = [
        abs(a - b) * row.temperature
        for row, x, y in zip(rows, wide, narrow, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    off, without = apart(rows, narrow), apart(rows, live)
    print(f"replayed {summary(off)}; routed anew {summary(without)}; the trainer's own rounding {summary(own)}")
    assert max(off) <= 3 * max(own) and sum(off) <= 2 * sum(own)
