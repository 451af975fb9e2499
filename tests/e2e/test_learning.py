"""Every way of learning resumes bitwise: two updates in one go equal one and a resumed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.recipe import assert_equal_runs, finish, read_lines, start
from tether.stored import find_checkpoint

pytestmark = pytest.mark.slow
FEATURES = {
    "ahead": ["overlap_rollouts=true", "kl=0.05", "mini_batches=2", "epochs=2", "drop_uninformative=true"],
    "sequences": ["preset=gspo", "mismatch=sequence_mask", "entropy_bonus=0.01", "depth=early:0.6:2:4"],
    "turns": [
        "rollout=examples.two_turns:retry",
        "reward=examples.two_turns:last_attempt",
        "max_new_tokens=40",
        "depth=early:0.6:2:4",
    ],
    "rewards": [
        "preset=rloo",
        "reference_scorer=engine",
        "truncated=mask",
        "trip_grad_norm=skip:1.5",
        "trip_entropy=skip:0.63",
    ],
}


@pytest.mark.parametrize("name", FEATURES)
def test_three_updates_equal_one_and_a_resumed_two(tmp_path: Path, name: str) -> None:
    """Parameters, moments, metrics and samples, with what is remembered and what is pending in the checkpoint."""
    settings = tuple(part for pair in [*FEATURES[name], "save_every=1"] for part in ("--set", pair))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(start(whole, "--updates", "3", settings=settings), whole)
    finish(start(parts, "--updates", "1", settings=settings), parts)
    finish(start(parts, "--updates", "3", "--resume", settings=settings), parts)
    assert_equal_runs(whole, parts, update=3)
    for update in range(1, 4):
        files = [out / "rollouts" / f"update_{update:07d}.jsonl" for out in (whole, parts)]
        one, other = ([{**line, "weight_version": None} for line in read_lines(file)] for file in files)
        assert one == other and one
    lines = read_lines(whole / "metrics.jsonl")
    versions = [
        read_lines(whole / "rollouts" / f"update_{u:07d}.jsonl")[0]["weight_version"]["update"] for u in (1, 2, 3)
    ]
    assert versions == ([0, 0, 1] if name == "ahead" else [0, 1, 2])
    if name == "turns":  # trained weights are larger than those at std 0.02, and so is their rounding
        assert max(line["logprob_diff_max"] for line in lines) < 1e-4 and any("loss_mask" in line for line in one)
    if name == "rewards":
        assert [line["num_steps"] for line in lines] == [0, 1, 1], "the first update is skipped, and remembered"
    if name == "ahead":
        assert lines[0]["num_steps"] == 4 and lines[2]["clip_fraction"] is not None and lines[1]["reference_kl"] > 0


def test_a_tripwire_stops_with_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    """The gradient norm exceeds its median sooner or later: the run ends with status 1, what was trained is saved, and
    with the wire looser the run goes on from there."""
    out = tmp_path / "run"
    settings = ("--set", "save_every=100", "--set", "trip_grad_norm=stop:1.0001", "--set", "depth=fixed:2")
    process = start(out, "--updates", "30", settings=settings)
    assert process.wait(timeout=300) == 1
    text, done = out.with_suffix(".log").read_text(), len(read_lines(out / "metrics.jsonl"))
    assert "TripwireStop: trip_grad_norm: the gradient norm is" in text
    assert 5 <= done < 30 and find_checkpoint(out).name == f"iter_{done:07d}"
    again = (*settings[:2], "--set", "trip_grad_norm=off", *settings[4:])
    finish(start(out, "--updates", str(done + 1), "--resume", settings=again), out)
    assert len(read_lines(out / "metrics.jsonl")) == done + 1
