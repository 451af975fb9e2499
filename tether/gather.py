"""The rollouts of an update as a whole: enough prompts that teach something, what is kept for later, what is too old.

Runs on rank 0 only.
"""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from adapters.contract import Engine, GenerationRequest, GenerationResult, Version
from tether import rollout
from tether.learn import Batch
from tether.mix import PromptMix
from tether.prepare import Job
from tether.recovery import with_restarts
from tether.reward_process import Judge
from tether.rollout import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What one update learns from."""

    samples: list[Sample]
    rewards: list[float | None]
    position: int
    """Prompts used since the very start, these included."""
    counts: dict[str, int]
    """Figures of how they were found."""

    def batch(self) -> Batch:
        """What every rank is given."""
        return Batch(
            samples=rollout.train_samples(self.samples),
            groups=[sample.group for sample in self.samples],
            rewards=self.rewards,
            truncated=[sample.result.finish_reason == "length" for sample in self.samples],
        )


def gather(
    engine: Engine, job: Job, judge: Judge, order: PromptMix, *, update: int, version: Version, position: int
) -> Rollouts:
    """Samples and rewards of an update; with drop_uninformative of prompts whose samples differ in reward.

    If too few prompts are left after top_up_tries further draws, the update has fewer prompts; if none is, it has
    those of the first draw, which then teach nothing.

    Raises:
        EngineError: the engine failed again and again.
        RuntimeError: the reward function failed for every sample.
    """
    wanted, tries = job.settings.prompts_per_update, 1 + job.settings.top_up_tries * job.settings.drop_uninformative
    kept: list[tuple[Sample, float | None]] = []
    first: list[tuple[Sample, float | None]] = []
    dropped = drawn = num_kept = 0
    for _ in range(tries):
        missing = wanted - num_kept
        if not missing:
            break
        records = [job.records[i] for i in order.take(position + drawn, missing)]
        draw = {"update": update, "version": version, "records": records, "first_group": drawn}
        samples = with_restarts(engine, lambda draw=draw: rollout.collect(engine, job, **draw))  # type: ignore[misc]
        pairs = list(zip(samples, rollout.rewards(judge, samples), strict=True))
        first, drawn = first or pairs, drawn + missing
        useful = _useful_groups(pairs) if job.settings.drop_uninformative else {sample.group for sample in samples}
        num_kept, dropped = num_kept + len(useful), dropped + missing - len(useful)
        kept += [pair for pair in pairs if pair[0].group in useful]
    if not kept:
        logger.warning("update %d: no prompt of %d had samples with different rewards", update, drawn)
        kept = first
    return Rollouts(
        samples=[sample for sample, _ in kept],
        rewards=[reward for _, reward in kept],
        position=position + drawn,
        counts={"num_prompts": num_kept or wanted, "prompts_dropped": dropped, "samples_stale": 0},
    )


def _useful_groups(pairs: Sequence[tuple[Sample, float | None]]) -> set[int]:
    from adapters.megatron.advantages import by_group, says_nothing

    members = by_group([reward for _, reward in pairs], [sample.group for sample, _ in pairs])
    return {group for group, values in members.items() if not says_nothing(values)}  # type: ignore[misc]


def without_stale(rollouts: Rollouts, *, update: int, max_staleness: int) -> Rollouts:
    """Leaves out, and counts, samples whose weights are more updates behind than allowed.

    On-policy samples of update u were drawn with the weights after update u - 1.

    Raises:
        RuntimeError: no sample is left.
    """
    fresh = [update - 1 - sample.result.version.update <= max_staleness for sample in rollouts.samples]
    if not any(fresh):
        raise RuntimeError(f"update {update}: all {len(fresh)} samples are more than {max_staleness} update(s) old")
    pairs = [p for p, keep in zip(zip(rollouts.samples, rollouts.rewards, strict=True), fresh, strict=True) if keep]
    return replace(
        rollouts,
        samples=[sample for sample, _ in pairs],
        rewards=[reward for _, reward in pairs],
        counts={**rollouts.counts, "samples_stale": fresh.count(False)},
    )


class _Packed(msgspec.Struct, frozen=True):
    """One sample as a checkpoint holds it."""

    record: int
    group: int
    request: GenerationRequest
    result: GenerationResult
    loss_mask: tuple[bool, ...]
    reward: float | None


def to_text(rollouts: Rollouts, job: Job) -> str:
    """Rollouts that wait for their update, for the checkpoint: the weights that drew them will be gone."""
    places = {id(record): index for index, record in enumerate(job.records)}
    packed = [
        _Packed(places[id(s.record)], s.group, s.request, s.result, s.loss_mask, reward)
        for s, reward in zip(rollouts.samples, rollouts.rewards, strict=True)
    ]
    data = msgspec.msgpack.encode((packed, rollouts.position, rollouts.counts))
    return base64.b85encode(zlib.compress(data, 1)).decode()


def from_text(text: str, job: Job) -> Rollouts:
    """What `to_text` was given, bit for bit."""
    data = zlib.decompress(base64.b85decode(text))
    kind: Any = tuple[list[_Packed], int, dict[str, int]]
    packed, position, counts = msgspec.msgpack.decode(data, type=kind)
    samples = [
        rollout.sample_of(
            job,
            record=job.records[each.record],
            group=each.group,
            request=each.request,
            result=each.result,
            loss_mask=each.loss_mask,
        )
        for each in packed
    ]
    return Rollouts(samples=samples, rewards=[each.reward for each in packed], position=position, counts=counts)
