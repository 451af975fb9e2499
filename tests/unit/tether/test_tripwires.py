"""Tripwires: what each says and does, with its fault on one rank of two; no rank is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tether.tripping import findings, launch
from tether.settings import Settings
from tether.tripwires import Tripwires, Watch, Wire


@pytest.fixture(scope="module")
def found(tiny_ouro: Path, tiny_olmoe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case once, in two processes; a hang ends them with an error."""
    folder = tmp_path_factory.mktemp("tripwires")
    shutil.copytree(tiny_ouro, folder / "model")
    shutil.copytree(tiny_olmoe, folder / "olmoe")
    launch(["dense", "routed"], folder=folder, world=2, deadline_seconds=200)
    return {**findings(folder, "dense"), **{f"router, {k}": v for k, v in findings(folder, "routed").items()}}


def both(found: dict[str, Any], case: str) -> dict[str, Any]:
    """What a case came to, which must be the same on both ranks, but for who quotes whom."""
    one, other = found[case]["ranks"]
    assert one.keys() == other.keys() and one["moved"] == other["moved"]
    assert {k: v for k, v in one.items() if k != "stopped"} == {k: v for k, v in other.items() if k != "stopped"}
    return {**one, "stopped": f"{one.get('stopped')} | {other.get('stopped')}"} if "stopped" in one else one


@pytest.mark.parametrize("case", ["healthy", "healthy again", "router, healthy"])
def test_a_healthy_update_touches_nothing(found: dict[str, Any], case: str) -> None:
    """Before the faults and after all of them."""
    got = both(found, case)
    assert got["trips"] == [] and got["moved"] and got["steps"] == 1 and got["watch"].skipped == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gradient, stop", "trip_non_finite: 1 gradient(s) are not finite: ['model.norm.weight']"),
        ("spike, stop", "trip_grad_norm: the gradient norm is"),
        ("difference, stop", "trip_score_difference: trainer and engine differ by"),
        ("reward, stop", "trip_reward: the mean reward of 5 updates fell from 0.9 to 0.44"),
        ("entropy, stop", "trip_entropy: the mean -log-prob of sampled tokens is 0.001"),
        ("router, stop", "trip_router: the router of layer"),
    ],
)
def test_stop_changes_nothing_and_says_why_on_every_rank(found: dict[str, Any], case: str, words: str) -> None:
    """The state before the update is whole, so it can be saved."""
    got = both(found, case)
    assert not got["moved"] and words in got["stopped"] and "None" not in got["stopped"]


@pytest.mark.parametrize(
    ("case", "skipped", "trips"),
    [
        ("gradient, skip", 1, []),
        ("loss, skip", 1, []),
        ("spike, skip", 1, []),
        ("difference, skip", 1, []),
        ("router, skip", 1, []),
        ("reward, skip", 0, [("reward", "skip")]),
        ("entropy, skip", 0, [("entropy", "skip")]),
        ("third skip", 1, [("skipped", "stop")]),
    ],
)
def test_skip_makes_no_step(found: dict[str, Any], case: str, skipped: int, trips: list[Any]) -> None:
    """The weights stay; skipped steps are counted, and the third update in a row that skips one stops the run."""
    got = both(found, case)
    assert not got["moved"] and got["steps"] == 0 and got["skipped"] == skipped and got["trips"] == trips
    assert got["watch"].skipped == (3 if case == "third skip" else skipped)


@pytest.mark.parametrize("case", ["spike, warn", "difference, warn", "reward, warn", "entropy, warn"])
def test_warn_only_tells(found: dict[str, Any], case: str) -> None:
    """The step is made, and the line of metrics says what happened."""
    got, kind = both(found, case), case.partition(",")[0]
    name = {"spike": "grad_norm", "difference": "score_difference"}.get(kind, kind)
    assert got["moved"] and got["trips"] == [(name, "warn")] and f"trip_{name}: " in got["text"]


@pytest.mark.parametrize("case", ["spike, off", "difference of older weights"])
def test_what_is_not_armed_is_not_judged(found: dict[str, Any], case: str) -> None:
    """A disarmed wire, and scores of samples that older weights drew on purpose."""
    got = both(found, case)
    assert got["moved"] and got["trips"] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("trip_non_finite", "warn"), ("trip_reward", "stop"), ("trip_grad_norm", "stop:-1"), ("trip_entropy", "off:1"),
     ("trip_skipped", "skip:3"), ("trip_router", "warn:2"), ("trip_reward", "stop:x")],
)  # fmt: skip
def test_settings_that_no_wire_can_take_are_refused(name: str, text: str) -> None:
    """Each says what it got and the forms there are."""
    with pytest.raises(ValueError, match=f"{name}: got '{text}', expected one of"):
        Tripwires.parse(Settings(**{name: text}))  # type: ignore[arg-type]
    assert Wire.parse("trip_grad_norm", "skip:4") == Wire("skip", 4.0)


def test_the_watch_remembers_what_is_usual() -> None:
    """Norms of the newest 20 updates, rewards of the newest 5, and the best and least of all."""
    wires, watch = Tripwires.parse(Settings()), Watch()
    told = {"entropy_estimate": 1.0, "staleness": 0}
    trained = {"logprob_diff_mean": 0.0, "skipped_steps": 0, "staleness": 0}
    for update in range(30):
        watch, trips = wires.before_training({**told, "reward_mean": update / 100}, watch)
        assert trips == []
        watch, trips = wires.after_training({**trained, "grad_norm": float(update + 1)}, watch)
        assert trips == []
    assert watch.grad_norms == [float(x) for x in range(11, 31)] and watch.rewards == [0.25, 0.26, 0.27, 0.28, 0.29]
    assert watch.best_reward == pytest.approx(0.27) and watch.least_reward == 0.0
    assert wires.step_limits({"staleness": 0}, watch)["grad_norm"] is None  # it warns; the trainer refuses nothing
