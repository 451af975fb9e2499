"""What is watched during a run, armed by default: each wire warns, skips the step, or stops with a saved checkpoint.

Everything is judged from values that are the same on every rank: metrics reduced by the trainer, figures of rank 0 that
every rank was given, and the history in the checkpoint. So all ranks act alike, and a resumed run acts as a continuous.

    trip_non_finite, trip_grad_norm, trip_score_difference, trip_router   before the step, inside the trainer
    trip_reward, trip_entropy                                             before training, from the rollouts
    trip_skipped                                                          after training
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

WINDOW = 20
"""Updates of which norms are remembered."""
LEAST_NORMS = 5
"""Norms that make a median."""
RECENT = 5
"""Updates whose mean reward counts as the reward now."""
ALLOWED = {
    "trip_non_finite": ("skip", "stop"),
    "trip_skipped": ("stop", "off"),
    "trip_router": ("skip", "stop", "off"),
}
ALWAYS = ("warn", "skip", "stop", "off")


class TripwireStop(RuntimeError):
    """A tripwire stopped the run. Its state was saved."""


@dataclass(frozen=True)
class Wire:
    """What a setting trip_NAME says."""

    action: str
    threshold: float = math.inf

    @classmethod
    def parse(cls, name: str, text: str) -> Wire:
        """Reads ACTION or ACTION:THRESHOLD.

        Raises:
            ValueError: an action that this wire cannot take, or no threshold > 0 where it needs one.
        """
        action, _, rest = text.partition(":")
        actions, needs = ALLOWED.get(name, ALWAYS), name != "trip_non_finite" and action != "off"
        try:
            threshold = float(rest) if rest else math.inf
        except ValueError:
            threshold = math.nan
        if action not in actions or needs != bool(rest) or not threshold > 0:
            form = ", ".join(a if a == "off" or name == "trip_non_finite" else f"{a}:NUMBER" for a in actions)
            raise ValueError(f"{name}: got {text!r}, expected one of {form}")
        return cls(action, threshold)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a run remembers for its tripwires; part of the checkpoint."""

    grad_norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of the newest updates."""
    best_reward: float | None = None
    """Largest mean over RECENT updates."""
    least_reward: float | None = None
    """Smallest reward of an update."""
    skipped: int = 0
    """Updates in a row that skipped a step."""


@dataclass(frozen=True)
class Trip:
    """A wire that was touched."""

    kind: str
    action: str
    text: str


def stop_if_asked(trips: Iterable[Trip]) -> None:
    """Raises TripwireStop if a touched wire stops the run."""
    if texts := [trip.text for trip in trips if trip.action == "stop"]:
        raise TripwireStop("; ".join(texts))


@dataclass(frozen=True, kw_only=True)
class Tripwires:
    """The wires of a run."""

    wires: Mapping[str, Wire]

    @classmethod
    def parse(cls, settings: Any) -> Tripwires:
        """From every setting trip_NAME. Raises ValueError, all problems in one message."""
        wires, problems = {}, []
        for name in sorted(n for n in vars(settings) if n.startswith("trip_")):
            try:
                wires[name.removeprefix("trip_")] = Wire.parse(name, getattr(settings, name))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n  ".join(problems))
        return cls(wires=wires)

    def step_limits(self, metrics: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
        """Arguments of the trainer's StepLimits: what refuses a step, and which refusals skip it."""
        return {
            "grad_norm": self._refusing("grad_norm", self._largest_norm(watch)),
            "score_difference": self._refusing("score_difference", self._largest_difference(metrics)),
            "skip": frozenset(
                kind for kind in ("non_finite", "grad_norm", "score_difference", "router")
                if self.wires[kind].action == "skip"
            ),
        }  # fmt: skip

    def before_training(self, metrics: Mapping[str, Any], watch: Watch) -> tuple[Watch, list[Trip]]:
        """Judges an update's rollouts; the watch remembers them."""
        watch = _with_reward(watch, metrics["reward_mean"])
        now, trips = fmean(watch.rewards), []
        if len(watch.rewards) == RECENT and watch.best_reward is not None and watch.least_reward is not None:
            fall, span = watch.best_reward - now, watch.best_reward - watch.least_reward
            if span > 0 and fall > self.wires["reward"].threshold * span:
                text = f"the mean reward of {RECENT} updates fell from {watch.best_reward:.4g} to {now:.4g}"
                trips += self._trip("reward", text)
        if (entropy := metrics["entropy_estimate"]) < self.wires["entropy"].threshold:
            trips += self._trip("entropy", f"the mean -log-prob of sampled tokens is {entropy:.3g}: one answer is left")
        return watch, trips

    def after_training(self, metrics: Mapping[str, Any], watch: Watch) -> tuple[Watch, list[Trip]]:
        """Judges what training did; the watch remembers it."""
        norm, trips = metrics["grad_norm"], []
        if (largest := self._largest_norm(watch)) is not None and norm is not None and norm > largest:
            trips += self._trip("grad_norm", f"the gradient norm is {norm:.4g}, {largest:.4g} was expected at most")
        apart, allowed = metrics["logprob_diff_mean"], self._largest_difference(metrics)
        if apart is not None and allowed is not None and apart > allowed:
            trips += self._trip("score_difference", f"trainer and engine differ by {apart:.3g} in the mean log-prob")
        skipped = watch.skipped + 1 if metrics["skipped_steps"] else 0
        if skipped >= self.wires["skipped"].threshold:
            trips += self._trip("skipped", f"{skipped} updates in a row skipped optimizer steps")
        norms = watch.grad_norms if norm is None else [*watch.grad_norms, norm][-WINDOW:]
        return replace(watch, grad_norms=norms, skipped=skipped), trips

    def _trip(self, kind: str, text: str) -> list[Trip]:
        wire = self.wires[kind]
        return [] if wire.action == "off" else [Trip(kind, wire.action, f"trip_{kind}: {text}")]

    def _refusing(self, kind: str, limit: float | None) -> float | None:
        return limit if self.wires[kind].action in ("skip", "stop") else None

    def _largest_difference(self, metrics: Mapping[str, Any]) -> float | None:
        """None for samples of older weights: those differ because the policy moved."""
        return None if metrics["staleness"] else self.wires["score_difference"].threshold

    def _largest_norm(self, watch: Watch) -> float | None:
        """None as long as too few updates were made to say what is usual."""
        if len(watch.grad_norms) < LEAST_NORMS or self.wires["grad_norm"].action == "off":
            return None
        return self.wires["grad_norm"].threshold * median(watch.grad_norms)


def _with_reward(watch: Watch, reward: float) -> Watch:
    rewards = [*watch.rewards, reward][-RECENT:]
    best = fmean(rewards) if len(rewards) == RECENT else -math.inf
    if watch.best_reward is not None:
        best = max(best, watch.best_reward)
    least = reward if watch.least_reward is None else min(reward, watch.least_reward)
    return replace(watch, rewards=rewards, best_reward=None if best == -math.inf else best, least_reward=least)
