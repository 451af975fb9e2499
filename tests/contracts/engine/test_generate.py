"""Generation: seeds, independence of the batch, isolation of bad requests, aborts, versions."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.contract import SEED_LIMIT, GenerationRequest, SamplingParams, sample_requests

from .conftest import CONTEXT, drawn, make_requests, near, run


def test_a_request_repeats_with_its_effective_seed_alone_and_in_any_batch(engine: Any) -> None:
    """Same request and seed: identical tokens, scores and trace, alone, together, reversed and replayed."""
    requests = make_requests("first")
    together = drawn(run(engine, requests))
    again = drawn(run(engine, list(reversed(make_requests("again")))))[::-1]
    alone = [drawn(run(engine, [request]))[0] for request in make_requests("alone")]
    assert together == again == alone
    assert len({each.tokens for each in together}) == len(together), "different seeds drew the same tokens"


def test_a_request_without_a_seed_gets_one_and_replays_with_it(engine: Any) -> None:
    """The effective seed comes from OS entropy, lies in [0, 2**63), and reproduces the sample."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = (
        run(engine, [GenerationRequest(request_id=f"free-{i}", prompt_token_ids=(5, 6, 7), sampling=params)])[0]
        for i in range(2)
    )
    assert 0 <= first.seed < SEED_LIMIT and first.seed != second.seed
    assert first.token_ids != second.token_ids
    replay = GenerationRequest(request_id="replay", prompt_token_ids=(5, 6, 7), sampling=params, seed=first.seed)
    assert drawn(run(engine, [replay])) == drawn([first])


@pytest.mark.parametrize("seed", [0, 1, SEED_LIMIT - 1])
def test_seeds_at_the_edges_are_used_as_they_are(engine: Any, seed: int) -> None:
    """0 is a seed, not "no seed"; the largest one works."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    results = [
        run(engine, [GenerationRequest(request_id=f"e{seed}-{i}", prompt_token_ids=(9,), sampling=params, seed=seed)])
        for i in range(2)
    ]
    assert drawn(results[0]) == drawn(results[1]) and results[0][0].seed == seed


def test_samples_of_one_prompt_have_unrelated_seeds(engine: Any) -> None:
    """n samples are n requests with seeds hashed from (seed, index); neighbouring seeds share no sample."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    seeds = set()
    tokens = set()
    for seed in (7, 8):
        base = GenerationRequest(request_id=f"n{seed}", prompt_token_ids=(4, 5), sampling=params, seed=seed)
        for result in run(engine, sample_requests(base, 4)):
            seeds.add(result.seed)
            tokens.add(result.token_ids)
    assert len(seeds) == len(tokens) == 8


def test_bad_requests_fail_alone(engine: Any) -> None:
    """Each bad request is a result with its reason; the good ones of the same call are not touched."""
    good = make_requests("good", 3)
    params = SamplingParams(max_tokens=4)
    bad = {
        "unknown-token": GenerationRequest(request_id="unknown-token", prompt_token_ids=(3, 256), sampling=params),
        "negative": GenerationRequest(request_id="negative", prompt_token_ids=(-1,), sampling=params),
        "empty": GenerationRequest(request_id="empty", prompt_token_ids=(), sampling=params),
        "too-long": GenerationRequest(request_id="too-long", prompt_token_ids=(3,) * (CONTEXT + 9), sampling=params),
        "no-room": GenerationRequest(request_id="no-room", prompt_token_ids=(3,) * (CONTEXT - 3), sampling=params),
        "policy": GenerationRequest(request_id="policy", prompt_token_ids=(3,), sampling=params, execution="fixed:5"),
        "policy-text": GenerationRequest(
            request_id="policy-text", prompt_token_ids=(3,), sampling=params, execution="fast"
        ),
    }
    results = {r.request_id: r for r in engine.generate([*bad.values(), *good])}
    for name in bad:
        assert results[name].finish_reason == "error" and results[name].error, results[name]
        assert results[name].seed == bad[name].effective_seed
    assert "256" in results["unknown-token"].error and "fixed:5" in results["policy"].error
    assert [drawn([results[r.request_id]]) for r in good] == [[d] for d in drawn(run(engine, make_requests("good", 3)))]


def test_prompt_as_long_as_the_context_allows(engine: Any) -> None:
    """P + max_tokens == context is served; one more is refused (above)."""
    params = SamplingParams(max_tokens=1)
    prompt = tuple(i % 250 + 2 for i in range(CONTEXT - 1))
    (result,) = run(engine, [GenerationRequest(request_id="full", prompt_token_ids=prompt, sampling=params, seed=3)])
    assert len(result.token_ids) == 1 and result.trace.shape[0] == CONTEXT - 1


def test_stop_tokens_and_lengths(engine: Any) -> None:
    """eos of the checkpoint (token 0) and given stop ids end a response and are part of it; else it runs to length."""
    free = run(engine, make_requests("free", 8, sampling=SamplingParams(max_tokens=40, ignore_eos=True)))
    stop = free[0].token_ids[5]
    first = free[0].token_ids.index(stop)
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    stopped = run(engine, make_requests("stopped", 1, sampling=params))[0]
    assert stopped.token_ids == free[0].token_ids[: first + 1] and stopped.finish_reason == "stop"
    assert near(stopped.logprobs, free[0].logprobs[: first + 1], engine.trace_kind)
    assert stopped.trace.shape[0] == len(stopped.token_ids)  # P + n - 1 with P = 1
    assert {len(r.token_ids) for r in free} == {40} and {r.finish_reason for r in free} == {"length"}


def test_greedy_reports_the_log_softmax_and_is_refused_for_training(engine: Any) -> None:
    """Temperature 0 takes the largest logit and reports log-softmax at temperature 1."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first, second = (run(engine, make_requests(f"greedy{i}", 3, sampling=params)) for i in range(2))
    assert drawn(first) == drawn(second)
    assert all(value < 0 for result in first for value in result.logprobs)
    for bad in (params, SamplingParams(max_tokens=1, top_p=0.9), SamplingParams(max_tokens=1, top_k=5)):
        with pytest.raises(ValueError, match="cannot be trained on"):
            bad.check_trainable()


def test_abort_keeps_what_there_is(engine: Any) -> None:
    """An aborted request comes back with its tokens so far, its seed and a fitting trace; the others finish."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    long = [
        GenerationRequest(request_id=f"long-{i}", prompt_token_ids=(7, 8, 9), sampling=params, seed=i) for i in range(2)
    ]
    short = make_requests("short", 1)
    results = {}
    for result in engine.generate([*long, *short]):
        results[result.request_id] = result
        if result.request_id == "short-0":
            engine.abort(["long-0", "never-existed", "long-0"])
    aborted, finished = results["long-0"], results["long-1"]
    assert aborted.finish_reason == "abort" and aborted.seed == 0
    count = len(aborted.token_ids)
    assert 0 < count < 200 and len(aborted.logprobs) == count and aborted.trace.shape[0] == 3 + count - 1
    assert len(finished.token_ids) == 200
    replay = run(engine, [long[0]])[0]
    assert replay.token_ids[:count] == aborted.token_ids
    assert near(replay.logprobs[:count], aborted.logprobs, engine.trace_kind)


def test_results_left_unread_are_aborted_and_nothing_accumulates(engine: Any) -> None:
    """A caller that stops reading leaves no request running and no trace behind."""
    requests = make_requests("unread", 8, sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in engine.generate(requests):
        break
    assert engine.health().num_running == 0
    assert engine.counters()["records"] == 0
    assert len(run(engine, make_requests("after", 2))) == 2


def test_duplicate_request_ids_are_refused(engine: Any) -> None:
    """Two requests of one call with one id could not be told apart."""
    with pytest.raises(ValueError, match="share an id"):
        list(engine.generate(make_requests("same", 1) * 2))
