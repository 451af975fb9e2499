"""Ouro on CUDA: trainer and engine compute the same at every depth, in fp32 and bf16, by DESIGN's yardstick."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.contract import GenerationRequest, SamplingParams, ScoreRequest
from adapters.vllm_engine.client.local import LocalEngine
from tests.contracts.depth.checks import check_rule
from tests.contracts.depth.harness import MIXED, Row, first_turn
from tests.contracts.engine.conftest import next_version, run, settings_for
from tests.contracts.yardstick import (
    differences,
    recorded,
    rounding_of,
    summary,
    trainer_for,
    trainer_logprobs,
    uniform,
    within,
)
from tests.oracle import Oracle
from tests.tiny import write_ouro

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("megatron")]
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=DTYPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An engine on the device, the checkpoint, and rollouts of all policies in one batch."""
    dtype = getattr(torch, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    path = write_ouro(folder / "model", dtype=dtype)
    with LocalEngine(settings_for(path, folder / "log", dtype=request.param)) as engine:
        rows = roll(engine)
        yield {"engine": engine, "path": path, "dtype": dtype, "rows": rows}


def roll(engine: LocalEngine) -> list[Row]:
    work = first_turn(MIXED)
    requests = [
        GenerationRequest(
            request_id=f"{i}",
            prompt_token_ids=tuple(w["prompt"]),
            sampling=SamplingParams(max_tokens=w["tokens"], temperature=w["temperature"], ignore_eos=True),
            seed=w["seed"],
            execution=w["execution"],
        )
        for i, w in enumerate(work)
    ]
    results = run(engine, requests)
    scores = engine.score(
        [
            ScoreRequest(
                request_id=f"score-{r.request_id}",
                token_ids=r.prompt_token_ids + result.token_ids,
                num_prompt_tokens=len(r.prompt_token_ids),
                temperature=r.sampling.temperature,
                trace=result.trace,
            )
            for r, result in zip(requests, results, strict=True)
        ]
    )
    return [
        Row(
            prompt=request.prompt_token_ids,
            tokens=result.token_ids,
            logprobs=result.logprobs,
            scores=score.logprobs,
            loops=tuple(result.trace.data) if result.trace else (),
            temperature=request.sampling.temperature,
            seed=request.effective_seed,
            execution=request.execution or "",
        )
        for request, result, score in zip(requests, results, scores, strict=True)
    ]


def test_trainer_equals_engine(case: dict[str, Any]) -> None:
    """Replaying the trace: within the yardstick; replayed at uniform depth: far outside."""
    rows, path, dtype = case["rows"], case["path"], case["dtype"]
    trainer = trainer_for(path, dtype)
    scores = trainer_logprobs(trainer, rows, recorded)
    own = rounding_of(path, dtype, rows, scores)
    off, flat = differences(rows, scores), differences(rows, trainer_logprobs(trainer, rows, uniform))
    print(f"\n{dtype}: trainer against engine {summary(off)}\n  own rounding {summary(own)}\n  uniform {summary(flat)}")
    assert within(off, own)
    assert not within(flat, own)


def test_scoring_by_trace_repeats_generation(case: dict[str, Any]) -> None:
    """Other batch shapes, other kernels: within the trainer's own rounding error, not bitwise as on CPU."""
    rows = case["rows"]
    own = rounding_of(
        case["path"], case["dtype"], rows, trainer_logprobs(trainer_for(case["path"], case["dtype"]), rows, recorded)
    )
    off = [abs(a - b) * r.temperature for r in rows for a, b in zip(r.scores, r.logprobs, strict=True)]
    print(f"\nscore by trace against generation: {summary(off)}")
    assert within(off, own)


def test_depths_obey_the_exit_rule(case: dict[str, Any]) -> None:
    """fp32: every recorded depth is what the rule gives for an fp64 computation of the same trace."""
    if case["dtype"] != torch.float32:
        pytest.skip("bf16 rounds the gate's input: decisions near the threshold may differ")
    oracle = Oracle(case["path"])
    for row in case["rows"]:
        check_rule(row, oracle)


def test_publication(case: dict[str, Any], tmp_path: Path) -> None:
    """Other weights in, then the first ones again: outputs change and come back exactly."""
    engine, dtype = case["engine"], case["dtype"]
    from safetensors.torch import load_file

    other = load_file(write_ouro(tmp_path / "other", seed=1, dtype=dtype) / "model.safetensors")
    before = roll(engine)
    report = engine.publish(next_version(engine), other)
    changed = roll(engine)
    engine.publish(next_version(engine), load_file(case["path"] / "model.safetensors"))
    print(f"\npublication: {report.num_bytes} bytes, {report.seconds}")
    assert [r.tokens for r in changed] != [r.tokens for r in before]
    assert [r.tokens for r in roll(engine)] == [r.tokens for r in before]
