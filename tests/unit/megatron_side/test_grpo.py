"""Group advantages and the clipped policy loss, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from adapters.megatron.grpo import GrpoSettings, group_advantages, policy_loss


def test_advantages_within_groups() -> None:
    """Rewards minus the group's mean over its sample standard deviation, whatever the order of the samples."""
    got = group_advantages([1.0, 10.0, 3.0, 10.0, 2.0], ["a", "b", "a", "b", "a"])
    assert got == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0], abs=1e-15)
    assert group_advantages([1.0, 2.0, 6.0], [0, 0, 0], normalise_std=False) == pytest.approx([-2.0, -1.0, 3.0])


@pytest.mark.parametrize("rewards", [[5.0], [0.1, 0.1, 0.1], [1e-300, 1e-300]])
def test_advantages_that_say_nothing_are_zero(rewards: list[float]) -> None:
    """A group of one and a group of equal rewards get 0, never NaN or rounding noise blown up."""
    assert group_advantages(rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_advantages_refuse_bad_input() -> None:
    """A reward that is not finite is named; counts must match."""
    with pytest.raises(ValueError, match=r"\[\(1, nan\)\]"):
        group_advantages([0.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match="1 rewards and 2 group ids"):
        group_advantages([0.0], [0, 0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.6, 0.0, True),  # 1 + clip_high = 1.3 bounds the gain
        (0.5, 2.0, -1.0, -1.0, False),  # a gain that got smaller is not clipped
        (0.5, -2.0, 1.8, 0.0, True),  # 1 - clip_low = 0.9 bounds the loss
        (1.5, -2.0, 3.0, 3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_policy_loss(ratio: float, advantage: float, value: float, slope: float, clipped: bool) -> None:
    """Value, gradient in the log-prob and clip flag of one token, for each side of the clip."""
    rollout = torch.tensor([-1.0])
    trainer = (rollout + math.log(ratio)).requires_grad_()
    loss = policy_loss(trainer, rollout, torch.tensor([advantage]), GrpoSettings(clip_low=0.1, clip_high=0.3))
    loss.sum.backward()
    assert float(loss.sum) == pytest.approx(value, abs=1e-6)
    assert trainer.grad is not None and float(trainer.grad) == pytest.approx(slope, abs=1e-6)
    assert bool(loss.clipped) is clipped
    assert float(loss.difference) == pytest.approx(math.log(ratio), abs=1e-6)


def test_settings_are_checked() -> None:
    """A clip range without room is refused."""
    with pytest.raises(ValueError, match="clip_low=0"):
        GrpoSettings(clip_low=0)
