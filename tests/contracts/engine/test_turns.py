"""A response of several turns: later turns continue what the earlier ones really ran, and the sample has one trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters.contract import SamplingParams, ScoreRequest, Trace
from tether.data import Record
from tether.episodes import Episode, generate_with

from .conftest import ROUNDING, make_requests, near, run

ENVIRONMENT = [17, 18, 19]
POLICIES = {"loops": "early:0.5:1:3", "experts": None}


def two_turns(engine: Any, tag: str, count: int = 6) -> list[Episode]:
    """Episodes that wrote 10 tokens, were answered by three, and wrote up to 10 more."""
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    requests = make_requests(tag, count, sampling=sampling, execution=POLICIES[engine.trace_kind])
    record = Record(prompt=None, prompt_token_ids=(), label="")
    episodes = [Episode(record=record, group=i, request=request) for i, request in enumerate(requests)]
    generate = generate_with(engine)
    generate(episodes)
    for episode in episodes:
        longer = msgspec.structs.replace(sampling, max_tokens=23)
        episode.request = msgspec.structs.replace(episode.request, sampling=longer)
        episode.append(ENVIRONMENT)
    generate(episodes)
    return episodes


def test_one_trace_repeats_every_turn(engine: Any) -> None:
    """Scored by the last turn's trace, both turns' tokens have the log-probs that they were drawn with."""
    episodes = two_turns(engine, "turns")
    wholes = [episode.whole() for episode in episodes]
    requests = [
        ScoreRequest(
            request_id=f"again-{i}",
            token_ids=episode.request.prompt_token_ids + whole.token_ids,
            num_prompt_tokens=len(episode.request.prompt_token_ids),
            trace=whole.trace,
        )
        for i, (episode, (whole, _)) in enumerate(zip(episodes, wholes, strict=True))
    ]
    apart, values = [], []
    for (whole, mask), score in zip(wholes, engine.score(requests), strict=True):
        assert list(mask) == [True] * 10 + [False] * 3 + [True] * 10
        apart += [abs(a - b) for a, b, own in zip(whole.logprobs, score.logprobs, mask, strict=True) if own]
    for episode in episodes:
        first, last = (result.trace for result in episode.results)
        assert (
            last.data[: len(first.data)] == first.data and last.shape[0] == len(episode.request.prompt_token_ids) + 22
        )
        values += list(last.data)
    print(f"max {max(apart):.1e} mean {sum(apart) / len(apart):.1e} count {len(apart)}")
    assert max(apart) <= ROUNDING[engine.trace_kind]
    assert len(set(values)) > 1, "the policy must mix what tokens run"


def test_a_turn_without_the_trace_is_another_computation(engine: Any, loops_only: None) -> None:
    """If the second turn ran the first one's tokens as a prompt, its log-probs would be others: the trace matters."""
    episodes = two_turns(engine, "forgetful")
    unlike = 0
    for i, episode in enumerate(episodes):
        second = episode.results[1]
        tokens = [*episode.request.prompt_token_ids, *episode.results[0].token_ids, *ENVIRONMENT]
        request = msgspec.structs.replace(
            episode.request, request_id=f"forgetful-{i}", prompt_token_ids=tuple(tokens), seed=second.seed,
            sampling=SamplingParams(max_tokens=10, ignore_eos=True),
        )  # fmt: skip
        unlike += run(engine, [request])[0].logprobs != second.logprobs
    assert unlike == len(episodes)


def test_continued_blocks_serve_nobody_else(engine: Any, loops_only: None) -> None:
    """A prompt of a continued response's tokens runs as a prompt: all loops, in cached blocks too."""
    sampling = SamplingParams(max_tokens=80, ignore_eos=True)
    (request,) = make_requests("blocks", 1, sampling=sampling, execution="fixed:1")
    (first,) = run(engine, [request])
    tokens = request.prompt_token_ids + first.token_ids
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    turn = msgspec.structs.replace(
        request, request_id="blocks-turn", prompt_token_ids=tokens, sampling=short, trace=first.trace
    )
    run(engine, [turn])
    plain = msgspec.structs.replace(turn, request_id="blocks-plain", trace=None, execution="fixed:4")
    (result,) = run(engine, [plain])
    score = ScoreRequest(
        request_id="blocks-score", token_ids=tokens + result.token_ids, num_prompt_tokens=len(tokens), trace=None
    )
    assert engine.score([score])[0].logprobs == result.logprobs


def test_traces_that_do_not_fit_fail_alone(engine: Any) -> None:
    """Of another kind, with a value that cannot be, or with more rows than the prompt has tokens."""
    (request,) = make_requests("fit", 1, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    (first,) = run(engine, [request])
    tokens, trace = request.prompt_token_ids + first.token_ids, first.trace
    good = msgspec.structs.replace(request, request_id="fits", prompt_token_ids=tokens, trace=trace)
    bad = {
        "kind": Trace("others", trace.shape, trace.data),
        "value": Trace(trace.kind, trace.shape, trace.data[:-1] + b"\xff"),
        "long": Trace(trace.kind, (trace.shape[0] * 2, *trace.shape[1:]), trace.data * 2),
    }
    requests = [msgspec.structs.replace(good, request_id=name, trace=each) for name, each in bad.items()]
    results = {result.request_id: result for result in engine.generate([*requests, good])}
    assert all(results[name].finish_reason == "error" and "trace" in results[name].error for name in bad)
    assert results["fits"].finish_reason == "length" and len(results["fits"].token_ids) == 6


@pytest.mark.usefixtures("megatron")
def test_the_trainer_replays_both_turns(engine: Any, models: Any, loops_only: None) -> None:
    """Trainer and engine differ by at most 2e-6 on the std-0.02 checkpoint, over both turns' tokens."""
    import torch

    from adapters.megatron.packing import TrainSample
    from tests.contracts.yardstick import trainer_for

    episodes = two_turns(engine, "trainer")
    samples = []
    for episode in episodes:
        whole, mask = episode.whole()
        samples.append(
            TrainSample(
                prompt_token_ids=episode.request.prompt_token_ids,
                response_token_ids=whole.token_ids,
                rollout_logprobs=whole.logprobs,
                loss_mask=mask,
                trace=torch.tensor(list(whole.trace.data)),  # type: ignore[union-attr]
            )
        )
    scores = trainer_for(models["A"], torch.float32).score(samples)
    apart = [
        abs(a - b)
        for sample, own in zip(samples, scores, strict=True)
        for a, b, trained in zip(sample.rollout_logprobs, own, sample.mask, strict=True)
        if trained
    ]
    print(f"max {max(apart):.1e} mean {sum(apart) / len(apart):.1e} count {len(apart)}")
    assert max(apart) <= 2e-6
    assert near(samples[0].rollout_logprobs[:1], scores[0][:1], "experts")
