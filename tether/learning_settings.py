"""The settings that decide what is learnt: loss, data, tripwires. `settings.Settings` adds the rest.

Whether choices go together is for the modules that they choose from to say; `prepare` asks them before anything starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

KL_PLACES = ("loss", "reward")
REFERENCE_SCORERS = ("trainer", "engine")
TRUNCATED = ("count", "mask")

PRESETS: dict[str, tuple[str, ...]] = {
    "grpo": ("normalisation=sequence", "kl=0.04"),
    "dapo": ("clip_high=0.28", "drop_uninformative=true", "truncated=mask"),
    "dr_grpo": ("advantage=centred", "normalisation=constant"),
    "gspo": ("loss=gspo", "normalisation=sequence", "clip_low=3e-4", "clip_high=4e-4"),
    "cispo": ("loss=cispo", "clip_low=1", "clip_high=4"),
    "rloo": ("advantage=rloo", "normalisation=constant", "constant_tokens=1", "kl=0.05", "kl_in=reward",
             "kl_estimator=k1"),
}  # fmt: skip
"""`--set preset=NAME` stands for these; settings given beside it count more."""


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """What is learnt, and from what."""

    advantage: str = "grpo"
    """How rewards of a group become advantages: grpo (centred, by standard deviation), centred, or rloo."""
    loss: str = "clip"
    """Policy loss: clip (of each token's ratio), gspo (of the sequence's), or cispo (clipped weight)."""
    normalisation: str = "token"
    """What an update's losses are averaged over: token, sequence (mean of means), or constant (constant_tokens)."""
    constant_tokens: int = 0
    """Length that normalisation=constant divides each sequence by; 0 is max_new_tokens."""
    clip_low: float = 0.2
    """The policy ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """The policy ratio is clipped at 1 + clip_high."""
    dual_clip: float = 0.0
    """Largest ratio that counts where the advantage is negative, > 1; 0 is off."""
    kl: float = 0.0
    """Weight of a KL penalty towards the model that the run began with; 0 needs no reference policy."""
    kl_in: str = "loss"
    """Where the KL penalty goes: loss, or reward (summed over the response, before advantages)."""
    kl_estimator: str = "k3"
    """Estimator of the KL penalty: k1 (in the reward only), k2 or k3."""
    reference_scorer: str = "trainer"
    """Who scores that model: trainer (a copy on the host, exchanged for its weights), or engine (another vLLM process
    on the engine's device)."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy, which is then computed exactly."""
    mini_batches: int = 1
    """Optimizer steps in one pass over an update's samples; more than one need scores before the first."""
    epochs: int = 1
    """Passes over an update's samples."""
    old_policy: str = "trainer"
    """At whose log-probs the ratio is 1: trainer (before the update), or rollout (the engine's own)."""
    mismatch: str = "token_truncate"
    """Importance weight of trainer against engine: none, {token,sequence}_truncate, {token,sequence}_mask."""
    mismatch_low: float = 0.5
    """Least weight that a mismatch mask keeps."""
    mismatch_high: float = 2.0
    """Largest weight that a mismatch truncation gives and a mask keeps."""
    truncated: str = "count"
    """Responses cut off at max_new_tokens: count (as any other), or mask (rewarded, not trained on)."""
    top_p: float = 1.0
    """Nucleus of sampling; only 1 can be trained on."""
    top_k: int = 0
    """Tokens to sample from; only 0 (all) can be trained on."""
    more_data: str = ""
    """Further data files with their weights, FILE:WEIGHT,FILE:WEIGHT; DATA itself has the weight 1."""
    drop_uninformative: bool = False
    """Leave out prompts whose samples all got the same reward, and draw others in their place."""
    top_up_tries: int = 3
    """Most times that other prompts are drawn for those left out, in one update."""
    reward_timeout_seconds: float = 30.0
    """Longest that the reward function may take for one sample; a sample without a reward is not trained on."""
    rollout: str = ""
    """Function module:function that makes samples of prompts, in several turns say; empty is one response each."""
    overlap_rollouts: bool = False
    """Make the next update's rollouts while this one trains, with weights one update older."""
    max_staleness: int = 1
    """Updates that a sample's weights may be behind; samples further behind are dropped."""
    trip_non_finite: str = "skip"
    """If loss or gradients are not finite: stop, or skip the step."""
    trip_skipped: str = "stop:3"
    """If so many updates in a row skipped steps: ACTION:UPDATES."""
    trip_grad_norm: str = "warn:10"
    """If the gradient norm exceeds so many times the median of the last updates: ACTION:TIMES, off to disarm."""
    trip_score_difference: str = "stop:0.1"
    """If trainer and engine differ more than this in the mean log-prob: ACTION:NATS, or off."""
    trip_reward: str = "warn:0.5"
    """If the reward falls by more than this share of the range it had: ACTION:SHARE, or off."""
    trip_entropy: str = "warn:0.01"
    """If the mean -log-prob of sampled tokens falls below this: ACTION:NATS, or off."""
    trip_router: str = "stop:1.05"
    """If a layer's load amounts to fewer than so many times top_k experts: ACTION:TIMES."""


def learning_violations(s: Any) -> list[tuple[str, str]]:
    """(field, what was expected) of every field of a LearningSettings that is outside its range."""
    least = {"mini_batches": 1, "epochs": 1, "constant_tokens": 0, "top_up_tries": 0, "max_staleness": 0}
    bad = [(name, f"an integer >= {low}") for name, low in least.items() if getattr(s, name) < low]
    whole = "trained log-probs are over the whole vocabulary, and the tokens that were left are not replayed"
    rules = {
        "top_p": (s.top_p == 1, f"1: {whole}"),
        "top_k": (s.top_k == 0, f"0: {whole}"),
        "kl": (math.isfinite(s.kl) and s.kl >= 0, "a finite number >= 0"),
        "kl_in": (s.kl_in in KL_PLACES, f"one of {', '.join(KL_PLACES)}"),
        "reference_scorer": (
            s.reference_scorer in (REFERENCE_SCORERS if s.kl else ("trainer",)),
            f"one of {', '.join(REFERENCE_SCORERS)}; trainer when kl is 0, which needs no reference",
        ),
        "truncated": (s.truncated in TRUNCATED, f"one of {', '.join(TRUNCATED)}"),
        "reward_timeout_seconds": (0 < s.reward_timeout_seconds < math.inf, "a finite number > 0"),
        "max_staleness": (s.max_staleness >= s.overlap_rollouts, "at least 1 with overlap_rollouts"),
        "rollout": (not s.rollout or len(list(filter(None, s.rollout.split(":")))) == 2, "module:function, or nothing"),
    }
    return bad + [(name, want) for name, (holds, want) in rules.items() if not holds]


def with_presets(pairs: list[str]) -> list[str]:
    """Pairs with every preset=NAME in front, spelled out: what is given beside a preset counts more.

    Raises:
        ValueError: an unknown preset.
    """
    names = [pair.partition("=")[2] for pair in pairs if pair.startswith("preset=")]
    if unknown := [name for name in names if name not in PRESETS]:
        raise ValueError(f"--set preset={unknown[0]}: expected one of {', '.join(sorted(PRESETS))}")
    return [pair for name in names for pair in PRESETS[name]] + [p for p in pairs if not p.startswith("preset=")]


def preset_lines() -> str:
    """What each preset stands for, for --help."""
    return "\n".join(f"  preset={name:<8} {' '.join(pairs)}" for name, pairs in PRESETS.items())
