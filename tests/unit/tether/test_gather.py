"""The prompts of an update: uninformative ones replaced, stale samples dropped, pending ones kept to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.contract import Version
from tests.unit.tether.test_rollout import ScriptedEngine, job  # noqa: F401
from tether import gather
from tether.learn import to_learn
from tether.prepare import Job

SERVED = Version(incarnation=1, update=0)


def gathered(job: Job, judge: Any, engine: Any = None, position: int = 0, **settings: Any) -> gather.Rollouts:  # noqa: F811
    changed = dataclasses.replace(job, settings=job.settings.replace(**settings))
    engine = engine or ScriptedEngine()
    return gather.gather(engine, changed, judge, changed.order(), update=1, version=SERVED, position=position)


def spread_where(metadata: set[int]) -> Any:
    """Rewards that differ within a prompt whose metadata is in the set, and are 0.5 in the others."""

    def judge(samples: Any) -> list[float | None]:
        return [i % 2 if sample["metadata"] in metadata else 0.5 for i, sample in enumerate(samples)]

    return judge


def test_without_the_filter_every_prompt_stays(job: Job) -> None:  # noqa: F811
    """Two prompts from position 0; the next update begins behind them."""
    found = gathered(job, spread_where(set()), prompts_per_update=2)
    assert found.position == 2 and [sample.group for sample in found.samples] == [0, 0, 1, 1]
    assert found.counts == {"num_prompts": 2, "prompts_dropped": 0, "samples_stale": 0}


def test_prompts_that_teach_nothing_are_replaced(job: Job) -> None:  # noqa: F811
    """As many others are drawn as are missing, a bounded number of times; positions count all that were drawn."""
    order = [job.records[i].metadata for i in job.order().take(0, 12)]
    engine = ScriptedEngine()
    found = gathered(job, spread_where({0}), engine, prompts_per_update=2, drop_uninformative=True, top_up_tries=9)
    places = [place for place, metadata in enumerate(order) if metadata == 0][:2]
    assert [sample.record.metadata for sample in found.samples] == [0] * 4
    assert sorted({sample.group for sample in found.samples}) == places
    assert len({request.seed for request in engine.requests}) == len(engine.requests), "every draw has its own seeds"
    assert found.counts["num_prompts"] == 2 and found.counts["prompts_dropped"] == len(engine.requests) // 2 - 2
    assert found.position == len(engine.requests) // 2


def test_tries_are_bounded(job: Job) -> None:  # noqa: F811
    """With nothing to learn from, the first draw is kept: the update teaches nothing, and the run goes on."""
    engine = ScriptedEngine()
    found = gathered(job, spread_where(set()), engine, prompts_per_update=2, drop_uninformative=True, top_up_tries=3)
    assert len(engine.requests) == 2 * 2 * 4 and found.position == 8
    assert [sample.group for sample in found.samples] == [0, 0, 1, 1] and found.counts["prompts_dropped"] == 8


def test_pending_rollouts_come_back_to_the_bit(job: Job) -> None:  # noqa: F811
    """Tokens, log-probs, traces, seeds, versions, records and rewards, one of them missing."""

    def judge(samples: Any) -> list[float | None]:
        return [None if i == 1 else i / 3 for i in range(len(samples))]

    found = gathered(job, judge, prompts_per_update=3)
    again = gather.from_text(gather.to_text(found, job), job)
    assert again.rewards == found.rewards and again.position == found.position and again.counts == found.counts
    for one, other in zip(found.samples, again.samples, strict=True):
        assert (one.rows == other.rows).all()
        assert dataclasses.replace(one, rows=None) == dataclasses.replace(other, rows=None)  # type: ignore[arg-type]


def test_stale_samples_are_dropped_and_counted(job: Job) -> None:  # noqa: F811
    """Samples of version 0 are on-policy for update 1; for update 3 they are two updates behind."""
    found = gathered(job, spread_where({0}), prompts_per_update=2)
    assert gather.without_stale(found, update=1, max_staleness=0).counts["samples_stale"] == 0
    assert len(gather.without_stale(found, update=3, max_staleness=2).samples) == 4
    with pytest.raises(RuntimeError, match=r"update 3: all 4 samples are more than 1 update\(s\) old"):
        gather.without_stale(found, update=3, max_staleness=1)
    first = found.samples[0]
    result = msgspec.structs.replace(first.result, version=Version(incarnation=1, update=2))
    newer = dataclasses.replace(first, result=result)
    mixed = gather.without_stale(
        dataclasses.replace(found, samples=[newer, *found.samples[1:]]), update=3, max_staleness=1
    )
    assert mixed.counts["samples_stale"] == 3 and mixed.samples == [newer]


def test_what_is_learnt_from_rewards_masks_and_failures(job: Job, tmp_path: Path) -> None:  # noqa: F811
    """A sample without a reward is not trained on, nor a cut-off one when asked so; advantages are of the others."""
    judge = lambda samples: [1.0, None, 0.0, 3.0, 1.0, 1.0]  # noqa: E731
    batch = gathered(job, judge, prompts_per_update=3).batch()
    batch = dataclasses.replace(batch, truncated=[False, False, True, False, False, False])
    for truncated, masks in (("count", [1, 0, 1, 1, 1, 1]), ("mask", [1, 0, 0, 1, 1, 1])):
        learnt, _ = to_learn(batch, job.settings.replace(truncated=truncated, advantage="centred"), None)
        assert [int(any(sample.mask)) for sample in learnt] == masks
        assert [sample.advantage for sample in learnt] == [0.0, 0.0, -1.5, 1.5, 0.0, 0.0]


class Shifted:
    """A reference whose log-probs lie a given distance below the rollout's."""

    def score(self, samples: Any) -> list[list[float]]:
        return [[value - 0.5 for value in sample.rollout_logprobs] for sample in samples]


def test_kl_in_the_reward_lowers_it_before_advantages(job: Job) -> None:  # noqa: F811
    """k1 of a response of three tokens, each 0.5 above the reference, is 1.5; k2 is 3 / 8."""
    judge = lambda samples: [1.0, 0.0] * 3  # noqa: E731
    batch = gathered(job, judge, prompts_per_update=3).batch()
    longer = dataclasses.replace(
        batch.samples[0], loss_mask=[True, False, True], reference_logprobs=[]
    )  # the masked token does not count
    batch = dataclasses.replace(batch, samples=[longer, *batch.samples[1:]])
    settings = job.settings.replace(kl=0.1, kl_in="reward", kl_estimator="k1", advantage="centred")
    learnt, figures = to_learn(batch, settings, Shifted())  # type: ignore[arg-type]
    rewards = [1 - 0.1 * 1.0, 0 - 0.1 * 1.5]
    assert learnt[0].advantage == pytest.approx((rewards[0] - rewards[1]) / 2)
    assert learnt[2].advantage == pytest.approx(0.5) and figures["reward_kl_mean"] == pytest.approx((1.0 + 5 * 1.5) / 6)
    _, figures = to_learn(batch, settings.replace(kl_estimator="k2"), Shifted())  # type: ignore[arg-type]
    assert figures["reward_kl_mean"] == pytest.approx((2 / 8 + 5 * 3 / 8) / 6)
    in_loss, figures = to_learn(batch, settings.replace(kl_in="loss"), Shifted())  # type: ignore[arg-type]
    assert figures == {} and in_loss[0].advantage == pytest.approx(0.5) and in_loss[0].reference_logprobs
