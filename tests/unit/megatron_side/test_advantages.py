"""Group advantages against values worked out by hand and hand-written formulas."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from adapters.megatron.advantages import Estimator, group_advantages


def test_advantages_within_groups() -> None:
    """Rewards minus the group's mean over its sample standard deviation, whatever the order of the samples."""
    got = group_advantages([1.0, 10.0, 3.0, 10.0, 2.0], ["a", "b", "a", "b", "a"])
    assert got == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0], abs=1e-15)
    assert group_advantages([1.0, 2.0, 6.0], [0, 0, 0], estimator="centred") == pytest.approx([-2.0, -1.0, 3.0])
    assert group_advantages([1.0, 2.0, 6.0], [0, 0, 0], estimator="rloo") == pytest.approx([-3.0, -1.5, 4.5])


def by_hand(rewards: list[float | None], groups: list[int], estimator: str) -> list[float]:
    wanted = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for i, r in enumerate(rewards) if groups[i] == group and i != index and r is not None]
        if reward is None or not others:
            wanted.append(0.0)
        elif estimator == "rloo":
            wanted.append(reward - sum(others) / len(others))
        else:
            values = [*others, reward]
            spread = statistics.stdev(values)
            scale = 1.0 if estimator == "centred" else (1 / spread if spread else 0.0)
            wanted.append((reward - statistics.mean(values)) * scale)
    return wanted


@pytest.mark.parametrize("estimator", ["grpo", "centred", "rloo"])
def test_random_groups_equal_hand_written(estimator: Estimator) -> None:
    """Groups of odd sizes in random order, some samples without a reward."""
    rng = random.Random(3)
    for _ in range(50):
        groups = [rng.randrange(5) for _ in range(23)]
        rewards = [None if rng.random() < 0.15 else rng.choice([0.0, 1.0, rng.gauss(0, 2)]) for _ in groups]
        got = group_advantages(rewards, groups, estimator=estimator)
        assert got == pytest.approx(by_hand(rewards, groups, estimator), abs=1e-12)


@pytest.mark.parametrize("rewards", [[5.0], [0.1, 0.1, 0.1], [1e-300, 1e-300], [None, 3.0, None], [None]])
def test_advantages_that_say_nothing_are_zero(rewards: list[float | None]) -> None:
    """A group of one and a group of equal rewards get 0, never NaN or rounding noise blown up."""
    for estimator in ("grpo", "centred", "rloo"):
        assert group_advantages(rewards, [0] * len(rewards), estimator=estimator) == [0.0] * len(rewards)  # type: ignore[arg-type]


def test_advantages_refuse_bad_input() -> None:
    """A reward that is not finite is named; counts must match; an unknown estimator is refused."""
    with pytest.raises(ValueError, match=r"\[\(1, nan\)\]"):
        group_advantages([0.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match="1 rewards and 2 group ids"):
        group_advantages([0.0], [0, 0])
    with pytest.raises(ValueError, match="expected one of grpo, centred, rloo"):
        group_advantages([0.0], [0], estimator="gae")  # type: ignore[arg-type]
