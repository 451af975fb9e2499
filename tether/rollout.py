"""One update's rollouts: requests out, results in, checked and told as samples. Runs on rank 0 only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from adapters.contract import (
    Engine,
    EngineError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    Version,
    derive_seed,
)
from tether.data import Record
from tether.prepare import Job
from tether.rewards import checked_reward

if TYPE_CHECKING:
    import numpy as np

    from adapters.megatron.packing import TrainSample


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response to one prompt."""

    record: Record
    group: int
    """Which prompt of the update it answers; advantages are relative within a group."""
    request: GenerationRequest
    result: GenerationResult
    rows: np.ndarray
    """What each input token ran, as the provider reads the trace."""
    response: str
    """The decoded response, special tokens left out."""


def collect(engine: Engine, job: Job, *, update: int, version: Version, records: Sequence[Record]) -> list[Sample]:
    """Generates a group of samples for each record. Their order is that of the records, however results arrive.

    Raises:
        EngineError: the engine failed, or requests did (names them), or other weights than `version` made a sample.
        ValueError: a trace does not fit its sample; names the sample.
    """
    settings, plan = job.settings, job.depth.plan(update)
    sampling = sampling_params(job, temperature=settings.temperature)
    sampling.check_trainable()
    requests = [
        GenerationRequest(
            request_id=f"update-{update}/prompt-{group}/sample-{i}",
            prompt_token_ids=record.prompt_token_ids,
            sampling=sampling,
            seed=derive_seed(settings.seed, update, group, i),
            execution=plan,
        )
        for group, record in enumerate(records)
        for i in range(settings.group_size)
    ]
    results = in_order(requests, engine.generate(requests))
    if stale := {str(result.version) for result in results} - {str(version)}:
        raise EngineError(f"rollout: weights {', '.join(sorted(stale))} made samples, expected {version} only")
    groups = [group for group in range(len(records)) for _ in range(settings.group_size)]
    return [
        _sample(job, record=records[group], group=group, request=request, result=result)
        for group, request, result in zip(groups, requests, results, strict=True)
    ]


def sampling_params(job: Job, *, temperature: float) -> SamplingParams:
    """What every request of a run samples with."""
    return SamplingParams(
        max_tokens=job.settings.max_new_tokens, temperature=temperature, stop_token_ids=job.stop_token_ids
    )


def in_order(requests: Sequence[GenerationRequest], results: Iterable[GenerationResult]) -> list[GenerationResult]:
    """Results in the order of their requests.

    Raises:
        EngineError: a request failed, was aborted or has no result; names the first five.
    """
    by_id = {result.request_id: result for result in results}
    problems = []
    for request in requests:
        result = by_id.get(request.request_id)
        if result is None or result.finish_reason not in ("stop", "length"):
            reason = "no result" if result is None else result.error or result.finish_reason
            problems.append(f"{request.request_id}: {reason}")
    if problems:
        raise EngineError(f"rollout: {len(problems)} of {len(requests)} requests failed: {'; '.join(problems[:5])}")
    return [by_id[request.request_id] for request in requests]


def rewards(job: Job, samples: Sequence[Sample]) -> list[float]:
    """The reward of each sample. Raises what `checked_reward` does."""
    return [
        checked_reward(
            job.reward,
            where=sample.request.request_id,
            prompt=sample.record.prompt,
            response=sample.response,
            response_token_ids=list(sample.result.token_ids),
            label=sample.record.label,
            metadata=sample.record.metadata,
        )
        for sample in samples
    ]


def train_samples(samples: Sequence[Sample], advantages: Sequence[float]) -> list[TrainSample]:
    """What the trainer learns from."""
    import torch

    from adapters.megatron.packing import TrainSample

    return [
        TrainSample(
            prompt_token_ids=sample.request.prompt_token_ids,
            response_token_ids=sample.result.token_ids,
            rollout_logprobs=sample.result.logprobs,
            advantage=advantage,
            trace=torch.from_numpy(sample.rows.astype("int64")),
            temperature=sample.request.sampling.temperature,
        )
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


def metrics(job: Job, update: int, samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, Any]:
    """What rank 0 knows of an update before training. `weight_version` is the one the engine serves after it."""
    traces = [(sample.rows, len(sample.request.prompt_token_ids)) for sample in samples]
    return {
        "update": update,
        "weight_version": update,
        "reward_mean": fmean(rewards),
        "num_tokens": sum(len(sample.result.token_ids) for sample in samples),
        "response_length_mean": fmean(len(sample.result.token_ids) for sample in samples),
        "truncated_share": fmean(sample.result.finish_reason == "length" for sample in samples),
        "execution": job.depth.plan(update),
        **job.part("trace").metrics(traces, job.config),
    }


def to_json(
    job: Job, samples: Sequence[Sample], rewards: Sequence[float], advantages: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """The lines of OUT/rollouts: everything needed to read, replay or score each sample."""
    for sample, reward, advantage in zip(samples, rewards, advantages, strict=True):
        request, result = sample.request, sample.result
        yield {
            "request_id": request.request_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "response_token_ids": list(result.token_ids),
            "response": sample.response,
            "label": sample.record.label,
            "logprobs": list(result.logprobs),
            **job.part("trace").describe(sample.rows, len(request.prompt_token_ids), job.config),
            "execution": request.execution,
            "seed": result.seed,
            "temperature": request.sampling.temperature,
            "weight_version": {"incarnation": result.version.incarnation, "update": result.version.update},
            "reward": reward,
            "advantage": advantage,
            "finish_reason": result.finish_reason,
        }


def _sample(job: Job, *, record: Record, group: int, request: GenerationRequest, result: GenerationResult) -> Sample:
    num_prompt_tokens = len(request.prompt_token_ids)
    rows = job.part("trace").rows_of(
        result.trace,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_prompt_tokens + len(result.token_ids),
        config=job.config,
        where=request.request_id,
    )
    response = job.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    return Sample(record=record, group=group, request=request, result=result, rows=rows, response=response)
