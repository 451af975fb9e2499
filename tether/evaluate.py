"""How good the policy is on prompts it does not train on: one greedy answer each."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from adapters.contract import Engine, GenerationRequest
from tether.prepare import Job
from tether.rewards import checked_reward
from tether.rollout import in_order, sampling_params


def held_out(engine: Engine | None, job: Job, update: int) -> dict[str, Any]:
    """{"eval_reward_mean": ...} when this update is one to evaluate after, else {}. Rank 0 only.

    Generated tokens run what the update's plan says, as in training.
    """
    if not job.settings.eval_every or update % job.settings.eval_every:
        return {}
    assert engine is not None
    requests = [
        GenerationRequest(
            request_id=f"evaluation-{update}/prompt-{i}",
            prompt_token_ids=record.prompt_token_ids,
            sampling=sampling_params(job, temperature=0.0),
            seed=0,
            execution=job.depth.plan(update),
        )
        for i, record in enumerate(job.held_out)
    ]
    results = in_order(requests, engine.generate(requests))
    rewards = [
        checked_reward(
            job.reward,
            where=result.request_id,
            prompt=record.prompt,
            response=job.tokenizer.decode(result.token_ids, skip_special_tokens=True),
            response_token_ids=list(result.token_ids),
            label=record.label,
            metadata=record.metadata,
        )
        for record, result in zip(job.held_out, results, strict=True)
    ]
    return {"eval_reward_mean": fmean(rewards)}
