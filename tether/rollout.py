"""One update's rollouts: prompts out, samples in, checked, rewarded and told. Runs on rank 0 only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tether.episodes import Episode, generate_with
from tether.prepare import Job
from tether.reward_process import Judge

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
    loss_mask: tuple[bool, ...] = ()
    """Response tokens that the model wrote; empty is all."""


def collect(
    engine: Engine, job: Job, *, update: int, version: Version, records: Sequence[Record], first_group: int = 0
) -> list[Sample]:
    """Generates a group of samples for each record. Their order is that of the records, however results arrive.

    Raises:
        EngineError: the engine failed, or requests did (names them), or other weights than `version` made a sample.
        ValueError: a trace does not fit its sample; names the sample.
    """
    settings, plan = job.settings, job.depth.plan(update)
    sampling = sampling_params(job, temperature=settings.temperature)
    sampling.check_trainable()
    episodes = [
        Episode(
            record=record,
            group=group,
            request=GenerationRequest(
                request_id=f"update-{update}/prompt-{group}/sample-{i}",
                prompt_token_ids=record.prompt_token_ids,
                sampling=sampling,
                seed=derive_seed(settings.seed, update, group, i),
                execution=plan,
            ),
        )
        for group, record in enumerate(records, start=first_group)
        for i in range(settings.group_size)
    ]
    job.rollout(episodes, generate_with(engine), job.tokenizer)
    samples = [_sample(job, episode) for episode in episodes]
    if stale := {str(sample.result.version) for sample in samples} - {str(version)}:
        raise EngineError(f"rollout: weights {', '.join(sorted(stale))} made samples, expected {version} only")
    return samples


def sampling_params(job: Job, *, temperature: float) -> SamplingParams:
    """What every request of a run samples with."""
    s = job.settings
    return SamplingParams(
        max_tokens=s.max_new_tokens,
        temperature=temperature,
        stop_token_ids=job.stop_token_ids,
        top_p=s.top_p,
        top_k=s.top_k,
    )


def rewards(judge: Judge, samples: Sequence[Sample]) -> list[float | None]:
    """The reward of each sample, None where the reward function failed. Raises what the judge does."""
    return judge([
        judged(sample.request.request_id, sample.record, sample.response, sample.result) for sample in samples
    ])  # fmt: skip


def judged(where: str, record: Record, response: str, result: GenerationResult) -> dict[str, Any]:
    """What a reward function is told of a sample."""
    return {
        "where": where,
        "prompt": record.prompt,
        "response": response,
        "response_token_ids": list(result.token_ids),
        "label": record.label,
        "metadata": record.metadata,
    }


def train_samples(samples: Sequence[Sample]) -> list[TrainSample]:
    """What the trainer is given of the samples; advantages are still to come."""
    import torch

    from adapters.megatron.packing import TrainSample

    return [
        TrainSample(
            prompt_token_ids=sample.request.prompt_token_ids,
            response_token_ids=sample.result.token_ids,
            rollout_logprobs=sample.result.logprobs,
            loss_mask=sample.loss_mask,
            trace=torch.from_numpy(sample.rows.astype("int64")),
            temperature=sample.request.sampling.temperature,
        )
        for sample in samples
    ]


def metrics(job: Job, update: int, samples: Sequence[Sample], rewards: Sequence[float | None]) -> dict[str, Any]:
    """What rank 0 knows of an update before training. `weight_version` is the one the engine serves after it."""
    traces = [(sample.rows, len(sample.request.prompt_token_ids)) for sample in samples]
    given = [reward for reward in rewards if reward is not None]
    drawn = [x for s in samples for x, own in zip(s.result.logprobs, _mask(s), strict=True) if own]
    return {
        "update": update,
        "weight_version": update,
        "reward_mean": fmean(given),
        "reward_failures": len(rewards) - len(given),
        "num_samples": len(samples),
        "num_response_tokens": sum(len(sample.result.token_ids) for sample in samples),
        "response_length_mean": fmean(len(sample.result.token_ids) for sample in samples),
        "response_length_max": max(len(sample.result.token_ids) for sample in samples),
        "truncated_share": fmean(sample.result.finish_reason == "length" for sample in samples),
        "entropy_estimate": -fmean(drawn),
        "staleness": max(update - 1 - sample.result.version.update for sample in samples),
        "execution": job.depth.plan(update),
        **job.part("trace").metrics(traces, job.config),
    }


def to_json(
    job: Job, samples: Sequence[Sample], rewards: Sequence[float | None], advantages: Sequence[float]
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
            **({"loss_mask": list(sample.loss_mask)} if sample.loss_mask else {}),
            **job.part("trace").describe(sample.rows, len(request.prompt_token_ids), job.config),
            "execution": request.execution,
            "seed": result.seed,
            "temperature": request.sampling.temperature,
            "weight_version": {"incarnation": result.version.incarnation, "update": result.version.update},
            "reward": reward,
            "advantage": advantage,
            "finish_reason": result.finish_reason,
            **({"kv_bytes": result.kv_bytes} if result.kv_bytes else {}),
        }


def sample_of(
    job: Job,
    *,
    record: Record,
    group: int,
    request: GenerationRequest,
    result: GenerationResult,
    loss_mask: tuple[bool, ...],
) -> Sample:
    """A sample of what an engine reported. Raises ValueError, naming it, if its trace does not fit."""
    num_prompt_tokens = len(request.prompt_token_ids)
    rows = job.part("trace").rows_of(
        result.trace,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_prompt_tokens + len(result.token_ids),
        config=job.config,
        where=request.request_id,
    )
    response = job.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    return Sample(
        record=record, group=group, request=request, result=result, rows=rows, response=response, loss_mask=loss_mask
    )


def _sample(job: Job, episode: Episode) -> Sample:
    result, mask = episode.whole()
    return sample_of(
        job, record=episode.record, group=episode.group, request=episode.request, result=result, loss_mask=mask
    )


def _mask(sample: Sample) -> Sequence[bool]:
    return sample.loss_mask or [True] * len(sample.result.token_ids)
