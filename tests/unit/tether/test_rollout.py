"""Rollouts of one update against an engine that records what it is asked and answers in the worst order."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from adapters.contract import EngineError, GenerationRequest, GenerationResult, Version, derive_seed
from providers.ouro.trace import to_trace
from tether import evaluate, rollout
from tether.prepare import Job, prepare
from tether.rewards import checked_reward, load_reward
from tether.settings import RunArguments, Settings

EOS = 0


class ScriptedEngine:
    """Answers every request with two tokens and EOS, last request first; some requests can be made to fail."""

    def __init__(self, *, failing: Sequence[str] = (), loops: int = 4) -> None:
        self.failing, self.loops, self.requests = failing, loops, list[GenerationRequest]()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        self.requests += requests
        for request in reversed(requests):
            result = GenerationResult(
                request_id=request.request_id,
                token_ids=(request.effective_seed % 200 + 2, 7, EOS),
                logprobs=(-0.5, -0.25, -0.125),
                seed=request.effective_seed,
                version=Version(incarnation=1, update=0),
                finish_reason="stop",
                trace=to_trace([4] * len(request.prompt_token_ids) + [self.loops, 2]),
            )
            if request.request_id in self.failing:
                result = msgspec.structs.replace(result, finish_reason="error", error="out of cache")
            yield result


@pytest.fixture
def job(tiny_ouro: Path, tmp_path: Path) -> Job:
    lines = [{"prompt_token_ids": [3 + i, 4, 5], "label": f"t{i}", "metadata": i} for i in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = Settings(
        seed=9, group_size=2, max_new_tokens=8, depth="cycle:3,4", eval_every=2, eval_data=str(tmp_path / "data.jsonl")
    )
    return prepare(
        RunArguments(model=tiny_ouro, data=tmp_path / "data.jsonl", out=tmp_path / "out", updates=2, settings=settings)
    )


SERVED = Version(incarnation=1, update=0)


def collect(engine: Any, job: Job, update: int = 1, version: Version = SERVED) -> list[rollout.Sample]:
    return rollout.collect(engine, job, update=update, version=version, records=job.records)


def test_samples_come_in_the_order_of_the_records(job: Job) -> None:
    """Results may stream in any order; packing and so every bit of the update must not depend on it."""
    samples = collect(ScriptedEngine(), job)
    assert [sample.record.metadata for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert [sample.group for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert all(sample.result.request_id == sample.request.request_id for sample in samples)
    assert [sample.result.token_ids[0] for sample in samples] == [s.request.effective_seed % 200 + 2 for s in samples]


def test_every_seed_follows_from_run_update_prompt_and_sample(job: Job) -> None:
    """So a run repeats, and no two samples share a seed."""
    engine = ScriptedEngine()
    collect(engine, job, update=1)
    collect(engine, job, update=2)
    want = [derive_seed(9, update, prompt, i) for update in (1, 2) for prompt in range(3) for i in range(2)]
    assert [request.seed for request in engine.requests] == want
    assert len(set(want)) == len(want)
    assert [request.execution for request in engine.requests] == ["fixed:3"] * 6 + ["fixed:4"] * 6
    assert {request.sampling.stop_token_ids for request in engine.requests} == {(EOS,)}


def test_failed_requests_are_named(job: Job) -> None:
    """An update never trains on part of its samples silently."""
    failing = ["update-1/prompt-1/sample-0", "update-1/prompt-2/sample-1"]
    with pytest.raises(EngineError) as failed:
        collect(ScriptedEngine(failing=failing), job)
    assert "2 of 6 requests failed" in str(failed.value)
    assert all(f"{name}: out of cache" in str(failed.value) for name in failing)


def test_samples_of_other_weights_are_refused(job: Job) -> None:
    """An engine that missed a publication would train the policy on another policy's samples."""
    with pytest.raises(EngineError, match=r"weights 1\.0 made samples, expected 2\.0 only"):
        collect(ScriptedEngine(), job, version=Version(incarnation=2, update=0))


def test_a_trace_that_does_not_fit_names_the_sample(job: Job) -> None:
    """Replaying a wrong trace would train on scores that the engine never had."""
    with pytest.raises(ValueError, match=r"update-1/prompt-0/sample-0: generated token at position 3 ran 5 loops"):
        collect(ScriptedEngine(loops=5), job)


def judge(samples: Any) -> list[float | None]:
    """The reward function in this process."""
    function = load_reward("tether.rewards:exact_match")
    return [checked_reward(function, **sample) for sample in samples]


def test_files_and_metrics_tell_what_happened(job: Job) -> None:
    """A line of OUT/rollouts is enough to replay the sample; the depths are those of the response tokens."""
    samples = collect(ScriptedEngine(loops=3), job)
    rewards = rollout.rewards(judge, samples)
    line = json.loads(json.dumps(next(iter(rollout.to_json(job, samples, rewards, [0.5] * 6)))))
    seed = derive_seed(9, 1, 0, 0)
    assert line == {
        "request_id": "update-1/prompt-0/sample-0",
        "prompt_token_ids": [3, 4, 5],
        "response_token_ids": [seed % 200 + 2, 7, EOS],
        "response": f"t{seed % 200 + 2} t7",
        "label": "t0",
        "logprobs": [-0.5, -0.25, -0.125],
        "exit_depths": [4, 3, 2],
        "execution": "fixed:3",
        "seed": seed,
        "temperature": 1.0,
        "weight_version": {"incarnation": 1, "update": 0},
        "reward": 0.0,
        "advantage": 0.5,
        "finish_reason": "stop",
    }
    metrics = rollout.metrics(job, 1, samples, rewards)
    assert metrics["depth_histogram"] == [0, 6, 6, 6] and metrics["depth_mean"] == 3.0
    assert (metrics["num_response_tokens"], metrics["response_length_mean"], metrics["truncated_share"]) == (
        18,
        3.0,
        0.0,
    )


def test_train_samples_carry_the_trace_of_their_inputs(job: Job) -> None:
    """One row per input token: the last generated token never was one."""
    for sample in rollout.train_samples(collect(ScriptedEngine(loops=3), job)):
        assert sample.trace is not None and sample.trace.tolist() == [4, 4, 4, 3, 2]
        assert sample.num_inputs == 5 and list(sample.rollout_logprobs) == [-0.5, -0.25, -0.125]


def test_evaluation_is_greedy_and_only_when_due(job: Job) -> None:
    """Held-out prompts get one answer each, at temperature 0, and figures of what the answers look like."""
    engine = ScriptedEngine(loops=3)
    assert evaluate.held_out(engine, job, judge, 1) == {}
    assert evaluate.held_out(engine, job, judge, 2) == {
        "eval_reward_mean": 0.0,
        "eval_stop_share": 1.0,
        "eval_response_length_mean": 3.0,
        "eval_depth_mean": 3.0,
        "eval_depth_histogram": [0, 3, 3, 3],
    }
    assert [request.sampling.temperature for request in engine.requests] == [0.0] * 3


def test_pass_at_k_is_the_share_of_subsets(job: Job) -> None:
    """Of answers that pass by a rule, pass@k counted over all subsets; the drawn answers have seeds of their own."""
    drawing = dataclasses.replace(job, settings=job.settings.replace(eval_samples=4))
    engine, told = ScriptedEngine(), []

    def every_third(samples: Any) -> list[float | None]:
        told.append(samples)
        return [float(i % 3 == 0) for i in range(len(samples))]

    figures = evaluate.held_out(engine, drawing, every_third, 2)
    passed = [[i % 3 == 0 for i in range(first, first + 4)] for first in (0, 4, 8)]
    for k in (1, 2, 4):
        want = fmean(fmean(any(subset) for subset in itertools.combinations(each, k)) for each in passed)
        assert figures[f"eval_pass_at_{k}"] == pytest.approx(want)
    assert [len(each) for each in told] == [3, 12]
    assert len({request.seed for request in engine.requests[3:]}) == 12
    assert {request.sampling.temperature for request in engine.requests[3:]} == {1.0}


def test_a_rollout_function_makes_samples_of_several_turns(job: Job) -> None:
    """Tokens and log-probs in order, the environment's masked, seeds and traces handed on, the budget kept."""
    asked: list[int] = []

    def talk(episodes: Any, generate: Any, tokenizer: Any) -> None:
        generate(episodes, max_tokens=4)
        for episode in episodes[::2]:
            asked.append(episode.room)
            episode.append([9, 8])
        generate(episodes[::2])
        episodes[0].append([5])  # nobody reads it: it is left out

    engine = ScriptedEngine(loops=3)
    samples = collect(engine, dataclasses.replace(job, rollout=talk))
    first, second, later = engine.requests[0], engine.requests[1], engine.requests[6]
    assert [r.sampling.max_tokens for r in (first, later)] == [4, 3] and asked == [5] * 3
    assert later.request_id == "update-1/prompt-0/sample-0/turn-1" and later.seed == derive_seed(first.seed, "turn", 1)
    assert later.prompt_token_ids == (3, 4, 5, first.effective_seed % 200 + 2, 7, EOS, 9, 8)
    assert first.trace is None and later.trace is not None and list(later.trace.data) == [4, 4, 4, 3, 2]
    two, one = samples[0], samples[1]
    assert two.loss_mask == (True,) * 3 + (False,) * 2 + (True,) * 3 and one.loss_mask == ()
    assert two.result.logprobs == (-0.5, -0.25, -0.125, 0.0, 0.0, -0.5, -0.25, -0.125)
    assert two.result.seed == first.seed and one.result.seed == second.seed and len(two.rows) == 3 + 8 - 1
    (trained, _) = rollout.train_samples(samples[:2])
    assert list(trained.mask) == list(two.loss_mask)
    assert rollout.metrics(job, 1, samples[:2], [1.0, 0.0])["entropy_estimate"] == pytest.approx(0.875 / 3)
    line = next(iter(rollout.to_json(job, samples[:1], [1.0], [0.5])))
    assert line["loss_mask"] == list(two.loss_mask)


def test_a_rollout_function_must_let_the_model_write(job: Job) -> None:
    """A sample without a token of the model's cannot be trained on."""
    with pytest.raises(ValueError, match="prompt-0/sample-0: the rollout function let the model write nothing"):
        collect(ScriptedEngine(), dataclasses.replace(job, rollout=lambda episodes, generate, tokenizer: None))
