"""Scores: what generation reported is what scoring the same tokens gives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters.contract import SamplingParams, ScoreRequest, Trace

from .conftest import ROUNDING, make_requests, near, run

NUM_LAYERS = 3  # of the tiny model; 12 tokens after a one-token prompt are 1 prefill and 11 decode steps


def score_of(request: Any, result: Any, **changes: Any) -> ScoreRequest:
    values = {
        "request_id": f"score-{request.request_id}",
        "token_ids": request.prompt_token_ids + result.token_ids,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "temperature": request.sampling.temperature,
        "trace": result.trace,
    }
    return ScoreRequest(**{**values, **changes})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("execution", [None, "fixed:2", "early:0.5:1:4"])
def test_scores_equal_what_generation_reported(engine: Any, temperature: float, execution: str | None) -> None:
    """Decode and scoring by trace run the same kernels on the same rows: exactly 0 apart (experts: rounding)."""
    if execution and engine.trace_kind != "loops":
        pytest.skip(f"a trace of {engine.trace_kind} has no depth")
    params = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
    requests = make_requests(f"t{temperature}{execution}", sampling=params, execution=execution)
    results = run(engine, requests)
    scores = engine.score([score_of(*pair) for pair in zip(requests, results, strict=True)])
    differences = [
        abs(a - b) for s, r in zip(scores, results, strict=True) for a, b in zip(s.logprobs, r.logprobs, strict=True)
    ]
    print(f"max {max(differences):.1e} mean {sum(differences) / len(differences):.1e} count {len(differences)}")
    assert max(differences) <= ROUNDING[engine.trace_kind] / temperature


def test_raw_scores_ignore_the_temperature(engine: Any) -> None:
    """raw is the log-softmax of the logits: what processed gives at temperature 1."""
    (request,) = make_requests("raw", 1, sampling=SamplingParams(max_tokens=5, temperature=0.5, ignore_eos=True))
    (result,) = run(engine, [request])
    raw, at_one, processed = (
        engine.score([score_of(request, result, request_id=f"m{i}", **changes)])[0].logprobs
        for i, changes in enumerate([{"mode": "raw"}, {"temperature": 1.0}, {}])
    )
    assert raw == at_one and raw != processed and near(processed, result.logprobs, engine.trace_kind)


def test_scoring_leaves_no_blocks_in_the_prefix_cache(engine: Any, loops_only: None) -> None:
    """A scored sequence ran by its trace; a later prompt of the same tokens must not find its blocks."""
    (request,) = make_requests(
        "shallow", 1, execution="fixed:1", sampling=SamplingParams(max_tokens=100, ignore_eos=True)
    )
    (result,) = run(engine, [request])
    engine.score([score_of(request, result)])
    long = msgspec.structs.replace(
        make_requests("second", 1)[0], prompt_token_ids=request.prompt_token_ids + result.token_ids
    )
    first = run(engine, [long])[0]
    full = engine.score([score_of(long, first, trace=None)])[0]
    assert near(full.logprobs, first.logprobs, engine.trace_kind)


def test_bad_score_requests_fail_alone(engine: Any) -> None:
    """A trace that does not fit, unknown ids: an error of that request only."""
    (request,) = make_requests("s", 1)
    (result,) = run(engine, [request])
    good = score_of(request, result)
    kind, shape, data = good.trace.kind, good.trace.shape, good.trace.data
    row = len(data) // shape[0]
    bad = {
        "length": {"trace": Trace(kind, (3, *shape[1:]), data[: 3 * row])},
        "kind": {"trace": Trace("others", shape, data)},
        "value": {"trace": Trace(kind, shape, data[:-1] + b"\xff")},
        "token": {"token_ids": good.token_ids[:-1] + (999,)},
    }
    requests = [msgspec.structs.replace(good, request_id=name, **changes) for name, changes in bad.items()]
    scores = engine.score([*requests, good])
    assert all(s.error and not s.logprobs for s in scores[:-1]), scores
    assert near(scores[-1].logprobs, result.logprobs, kind)
    assert [s.request_id for s in scores] == [*bad, good.request_id]


def test_shallow_decoding_runs_fewer_layers(engine: Any, loops_only: None) -> None:
    """fixed:2 decodes with exactly half the layer calls of fixed:4; the prompt runs all loops in both."""
    calls = {}
    for execution in ("fixed:4", "fixed:2"):
        before = engine.counters()["layer_calls"]
        (request,) = make_requests(f"count-{execution}", 1, execution=execution)
        (result,) = run(engine, [request])
        prefill = max(result.trace.data) * NUM_LAYERS
        calls[execution] = engine.counters()["layer_calls"] - before - prefill
    assert calls["fixed:4"] == 2 * calls["fixed:2"] == NUM_LAYERS * 4 * 11
