"""How good the policy is on prompts it does not train on: one greedy answer each, and pass@k of several drawn ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean
from typing import Any

from adapters.contract import Engine, GenerationRequest, GenerationResult, derive_seed
from tether.episodes import in_order
from tether.prepare import Job
from tether.reward_process import Judge
from tether.rollout import judged, sampling_params


def held_out(engine: Engine | None, job: Job, judge: Judge, update: int) -> dict[str, Any]:
    """Figures `eval_...` when this update is one to evaluate after, else {}. Rank 0 only.

    Generated tokens run what the update's plan says, as in training. A sample whose reward function fails counts as 0.
    """
    if not job.settings.eval_every or update % job.settings.eval_every:
        return {}
    assert engine is not None
    greedy, rewards = _answers(engine, job, judge, update, temperature=0.0, count=1)
    figures = {"eval_reward_mean": fmean(rewards), **_figures(job, greedy)}
    if count := job.settings.eval_samples:
        _, rewards = _answers(engine, job, judge, update, temperature=job.settings.temperature, count=count)
        passed = [reward >= job.settings.eval_pass_reward for reward in rewards]
        correct = [sum(passed[i : i + count]) for i in range(0, len(passed), count)]
        figures |= {f"eval_pass_at_{k}": fmean(pass_at(k, c, count) for c in correct) for k in _powers(count)}
    return figures


def pass_at(k: int, correct: int, count: int) -> float:
    """The chance that one of k answers passes, from `correct` of `count` drawn: 1 - C(n - c, k) / C(n, k).

    Unbiased; source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    return 1 - comb(count - correct, k) / comb(count, k)


def _answers(
    engine: Engine, job: Job, judge: Judge, update: int, *, temperature: float, count: int
) -> tuple[list[GenerationResult], list[float]]:
    """`count` answers to each held-out prompt, one after another, and their rewards."""
    kind = "greedy" if temperature == 0 else "drawn"
    records = [record for record in job.held_out for _ in range(count)]
    requests = [
        GenerationRequest(
            request_id=f"evaluation-{update}/{kind}/prompt-{i // count}/sample-{i % count}",
            prompt_token_ids=record.prompt_token_ids,
            sampling=sampling_params(job, temperature=temperature),
            seed=derive_seed(job.settings.seed, "evaluation", update, i) if temperature else 0,
            execution=job.depth.plan(update),
        )
        for i, record in enumerate(records)
    ]
    results = in_order(requests, engine.generate(requests))
    texts = [job.tokenizer.decode(result.token_ids, skip_special_tokens=True) for result in results]
    told = [judged(r.request_id, x, text, r) for r, x, text in zip(results, records, texts, strict=True)]
    return results, [reward or 0.0 for reward in judge(told)]


def _figures(job: Job, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """What greedy answers look like: how many end by themselves, how long they are, how much of the model they ran."""
    trace, traces = job.part("trace"), []
    for record, result in zip(job.held_out, results, strict=True):
        prompt = len(record.prompt_token_ids)
        size = prompt + len(result.token_ids)
        rows = trace.rows_of(
            result.trace, num_prompt_tokens=prompt, num_tokens=size, config=job.config, where=result.request_id
        )
        traces.append((rows, prompt))
    told = trace.metrics(traces, job.config)
    return {
        "eval_stop_share": fmean(result.finish_reason == "stop" for result in results),
        "eval_response_length_mean": fmean(len(result.token_ids) for result in results),
        **{f"eval_{name}": value for name, value in told.items() if name.startswith("depth_")},
    }


def _powers(count: int) -> list[int]:
    """1, 2, 4, ... up to count."""
    return [1 << i for i in range(count.bit_length())]
