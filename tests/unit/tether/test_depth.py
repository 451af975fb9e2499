"""Depth schedules: which policy an update runs."""

from __future__ import annotations

import pytest

from providers.ouro.trace import DepthPolicy
from tether.depth import DepthSchedule


@pytest.mark.parametrize(
    ("text", "plans"),
    [
        ("full", ["full"] * 4),
        ("fixed:3", ["fixed:3"] * 4),
        ("cycle:3,4,2", ["fixed:3", "fixed:4", "fixed:2", "fixed:3"]),
        ("cycle:2,early:0.8:2:4", ["fixed:2", "early:0.8:2:4"] * 2),
        ("early:0.9:2:4", ["early:0.9:2:4"] * 4),
        ("delayed:0.9:2:4", ["delayed:0.9:2:4"] * 4),
    ],
)
def test_plan_depends_on_the_update_alone(text: str, plans: list[str]) -> None:
    """Update u of a cycle runs its entry (u - 1) mod length, so a resumed run goes on in the middle."""
    schedule = DepthSchedule.parse(text)
    assert [schedule.plan(update) for update in range(1, 5)] == plans
    assert [schedule.plan(update) for update in (4, 2, 3, 1)] == [plans[i] for i in (3, 1, 2, 0)]


def test_policies_that_do_not_fit_the_model_are_named_together() -> None:
    """A cycle is checked entry by entry against the model's loops."""
    schedule = DepthSchedule.parse("cycle:5,4,6")
    with pytest.raises(ValueError) as refused:
        schedule.check(lambda policy: DepthPolicy.parse(policy, 4))
    assert "fixed:5" in str(refused.value) and "fixed:6" in str(refused.value)
    DepthSchedule.parse("cycle:4,1").check(lambda policy: DepthPolicy.parse(policy, 4))
