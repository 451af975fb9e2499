"""Samples of a rollout -> the framework's training data, every record checked against its sample's tokens.

Replaces the framework's own conversion, which takes side inputs as they are: a sample without them would shift those of
every sample behind it in its micro-batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from adapters.megatron.advantages import group_advantages
from tether.vime.about import ABOUT
from tether.vime.arguments import ModelFacts, facts_of
from tether.vime.replay import DEPTHS, LENGTHS

GROUPED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""The framework's estimators whose rewards are relative to their group."""
SCALED = ("grpo", "gspo", "cispo")
"""Of those, the ones that divide by the group's standard deviation, if --grpo-std-normalization is left on."""


_versions: list[str] = []
"""The newest weights of each rollout that this process has converted."""


def convert_samples(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """For --custom-convert-samples-to-train-data-path.

    A sample that was aborted, failed, or has no reward is kept, so that the framework's counts stay what they were, but
    masked, and it does not count in its group. One without any response token is given one, masked too.

    Raises:
        ValueError: samples whose record, log-probs or mask do not fit their tokens; the first ten, in one message.
        RuntimeError: training goes on, but the weights that draw the samples stay the same.
    """
    _refuse_stale(args, samples)
    facts = facts_of(args)
    rows = [_row(args, facts, sample) for sample in samples]
    if problems := [f"sample {i}: {text}" for i, row in enumerate(rows) for text in row["problems"]]:
        raise ValueError(f"{len(problems)} problem(s) with {len(rows)} sample(s): " + "; ".join(problems[:10]))
    column = partial(_column, rows)
    raw_rewards, rewards = _rewards(args, samples, column("counts"))
    data = {
        "tokens": column("tokens"),
        "response_lengths": column("response_length"),
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(_status(sample) == "truncated") for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": _rollout_ids(samples),
        "loss_masks": column("loss_mask"),
        "rollout_log_probs": column("logprobs"),
    }
    data["rollout_mask_sums"] = _mask_sums(data["rollout_ids"], data["loss_masks"])
    if facts.trace.KIND == "loops":
        data["multimodal_train_inputs"] = [
            {DEPTHS: row["trace"], LENGTHS: torch.tensor([len(row["trace"])])} for row in rows
        ]
    elif getattr(args, "use_rollout_routing_replay", False):
        data["rollout_routed_experts"] = column("trace")
    if all(getattr(sample, "train_metadata", None) is not None for sample in samples):
        data["metadata"] = [sample.train_metadata for sample in samples]
    return data


def _refuse_stale(args: Any, samples: Sequence[Any]) -> None:
    """A framework without an engine of its own publishes nothing, and says so in a line of its log only."""
    drawn = {about["version"] for sample in samples if (about := (sample.metadata or {}).get(ABOUT))}
    if not drawn or getattr(args, "debug_rollout_only", False):
        return
    _versions.append(max(drawn, key=lambda text: tuple(map(int, text.split(".")))))
    most = getattr(args, "update_weights_interval", None) or 1
    if len(_versions) > most and len(set(_versions[-most - 1 :])) == 1:
        raise RuntimeError(
            f"weights {_versions[-1]} have drawn {most + 1} rollouts in a row, expected {most} at most "
            "(--update-weights-interval): nothing was published after training. The framework publishes only while it "
            "has an engine of its own (--rollout-num-gpus 1 is enough)"
        )


def _row(args: Any, facts: ModelFacts, sample: Any) -> dict[str, Any]:
    """One sample, completed where it is empty, and what is wrong with it."""
    tokens, length = list(sample.tokens), sample.response_length
    logprobs, mask = list(sample.rollout_log_probs or []), sample.loss_mask
    mask = [1] * length if mask is None else list(mask)
    counts = _status(sample) not in ("aborted", "failed") and sample.reward is not None and length > 0
    if not counts or getattr(sample, "remove_sample", False):
        mask = [0] * len(mask)
    trace, problems = _trace(args, facts, sample)
    if not tokens or not 0 <= length < len(tokens):
        problems.append(f"response_length: got {length!r} of {len(tokens)} tokens, expected at least one prompt token")
    if length == 0:
        tokens, length, logprobs, mask = [*tokens, tokens[-1] if tokens else 0], 1, [0.0], [0]
        trace = _one_more(facts, trace)
    for name, values in (("rollout_log_probs", logprobs), ("loss_mask", mask)):
        if len(values) != length:
            problems.append(f"{name}: got {len(values)}, expected {length}")
    return {
        "tokens": tokens,
        "response_length": length,
        "logprobs": logprobs,
        "loss_mask": mask,
        "trace": trace,
        "counts": counts,
        "problems": problems,
    }


def _trace(args: Any, facts: ModelFacts, sample: Any) -> tuple[Any, list[str]]:
    """What the sample's tokens ran, as the framework carries it, and what is wrong with it."""
    if facts.trace.KIND == "loops":
        return _depths(facts, sample)
    if not getattr(args, "use_rollout_routing_replay", False):
        return None, []
    experts = getattr(sample, "rollout_routed_experts", None)
    if experts is None and sample.response_length == 0:
        experts = torch.from_numpy(facts.trace.last_row(facts.config).astype("int32")).repeat(
            len(sample.tokens) - 1, 1, 1
        )
    if experts is None:
        return None, ["rollout_routed_experts: missing, expected the experts of each input token"]
    experts = torch.as_tensor(experts).to(torch.int32)
    wanted = (len(sample.tokens) - 1, *facts.trace.row_shape(facts.config))
    if tuple(experts.shape) != wanted:
        return experts, [f"rollout_routed_experts: got shape {tuple(experts.shape)}, expected {wanted}"]
    problem = facts.trace.problem_of(experts.numpy(), facts.config)
    return experts, [f"rollout_routed_experts: {problem}"] if problem else []


def _depths(facts: ModelFacts, sample: Any) -> tuple[Any, list[str]]:
    loops, num_tokens = facts.config.num_loops, len(sample.tokens)
    side = sample.multimodal_train_inputs or {}
    if set(side) - {DEPTHS, LENGTHS}:
        return None, [f"multimodal_train_inputs: got {sorted(side)}, expected only {DEPTHS} and {LENGTHS}"]
    if DEPTHS not in side:
        if sample.response_length == 0:  # nothing was drawn: a prompt runs in full
            return torch.full((num_tokens,), loops, dtype=torch.int64), []
        return None, [f"multimodal_train_inputs: no {DEPTHS}, expected the loops of each token"]
    depths = torch.as_tensor(side[DEPTHS]).to("cpu", torch.int64)
    if tuple(depths.shape) != (num_tokens,):
        return depths, [f"{DEPTHS}: got shape {tuple(depths.shape)}, expected ({num_tokens},): one per token"]
    num_prompt = num_tokens - sample.response_length
    low = torch.where(torch.arange(num_tokens) < num_prompt, loops, 1)
    bad = ((depths < low) | (depths > loops)).nonzero()[:, 0].tolist()
    if bad:
        place = bad[0]
        return depths, [f"{DEPTHS}: position {place} ran {int(depths[place])}, expected {int(low[place])}..{loops}"]
    return depths, []


def _one_more(facts: ModelFacts, trace: Any) -> Any:
    """The record of a sample that is given a token it did not have: its last token is an input now."""
    if trace is None:
        return None
    last = torch.as_tensor(facts.trace.last_row(facts.config)).to(trace.dtype)
    return torch.cat([trace, last[None]])


def _rewards(args: Any, samples: Sequence[Any], counts: list[bool]) -> tuple[list[float], list[float]]:
    """(raw rewards, what advantages are made of), as the framework makes them; 0 where a sample does not count."""
    if getattr(args, "custom_reward_post_process_path", None):
        module, _, name = args.custom_reward_post_process_path.rpartition(".")
        return getattr(importlib.import_module(module), name)(args, samples)
    raw = [float(sample.get_reward_value(args)) if sample.reward is not None else 0.0 for sample in samples]
    if args.advantage_estimator not in GROUPED or not getattr(args, "rewards_normalization", True):
        return raw, [value if each else 0.0 for value, each in zip(raw, counts, strict=True)]
    scaled = args.advantage_estimator in SCALED and getattr(args, "grpo_std_normalization", True)
    given = [value if each else None for value, each in zip(raw, counts, strict=True)]
    groups = [_group(args, i, sample) for i, sample in enumerate(samples)]
    return raw, group_advantages(given, groups, estimator="grpo" if scaled else "centred")


def _group(args: Any, place: int, sample: Any) -> int:
    group = getattr(sample, "group_index", None)
    return place // args.n_samples_per_prompt if group is None else group


def _rollout_ids(samples: Sequence[Any]) -> list[int]:
    """Samples that come from one rollout share its id; one without gets a number that nobody else has."""
    given = [sample.rollout_id for sample in samples]
    free = iter(sorted(set(range(len(given) + len(samples))) - {each for each in given if each is not None}))
    return [next(free) if each is None else each for each in given]


def _mask_sums(rollout_ids: list[int], masks: list[list[int]]) -> list[int]:
    """For each sample the trained tokens of its whole rollout: what the framework divides a rollout's loss by."""
    sums = dict.fromkeys(rollout_ids, 0)
    for rollout, mask in zip(rollout_ids, masks, strict=True):
        sums[rollout] += sum(mask)
    return [sums[rollout] for rollout in rollout_ids]


def _status(sample: Any) -> str:
    return str(getattr(sample.status, "value", sample.status)).lower()


def _column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]
