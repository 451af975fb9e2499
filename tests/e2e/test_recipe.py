"""The whole thing: examples/ouro/run.sh with real Megatron-Core and real vLLM, killed, resumed, exported and served."""

from __future__ import annotations

import re
import signal
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tests.contracts.depth.harness import MIXED, rollouts
from tests.contracts.yardstick import (
    differences,
    recorded,
    rounding_of,
    summary,
    trainer_for,
    trainer_logprobs,
    uniform,
    within,
)
from tests.e2e.recipe import assert_equal_runs, finish, processes_of, read_lines, start, wait_until
from tether.stored import find_checkpoint

KEYS = {
    "update", "weight_version", "reward_mean", "loss", "grad_norm", "logprob_diff_mean", "logprob_diff_max",
    "num_tokens", "train_model_flops", "train_flops_per_second", "rollout_tokens_per_second", "rollout_seconds",
    "train_seconds", "publish_seconds", "save_seconds",
}  # fmt: skip
PUBLICATION = ("write", "stage", "prepare", "drain", "load", "read_back", "settle")
ROLLOUT_KEYS = {
    "prompt_token_ids", "response_token_ids", "response", "logprobs", "exit_depths", "seed", "temperature",
    "weight_version", "reward", "advantage", "finish_reason",
}  # fmt: skip


@pytest.fixture(scope="module")
def continuous(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four updates in one go: OUT and what was printed."""
    out = tmp_path_factory.mktemp("continuous") / "run"
    return out, finish(start(out), out)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, continuous: tuple[Path, str]) -> Path:
    """A run killed without warning in update 4, when its newest checkpoint is that of update 2."""
    out = tmp_path_factory.mktemp("killed") / "run"
    process = start(out, "--updates", "40")  # the number of updates is not part of the contract
    try:
        wait_until(
            lambda: process.poll() is not None or len(read_lines(out / "metrics.jsonl")) >= 3,
            seconds=240,
            what="three updates",
        )
        assert process.poll() is None, out.with_suffix(".log").read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    return out


@pytest.fixture(scope="module")
def resumed(killed: Path) -> Path:
    """The killed run, gone on from update 2 to 4 by a fresh process."""
    assert find_checkpoint(killed).name == "iter_0000002", "killed too late for this test"
    assert len(read_lines(killed / "metrics.jsonl")) >= 3 and (killed / "rollouts" / "update_0000003.jsonl").exists()
    finish(start(killed, "--updates", "4", "--resume"), killed)
    return killed


def test_recipe_leaves_a_whole_run(continuous: tuple[Path, str]) -> None:
    """Metrics, every sample, checkpoints from the very start, an export, and three lines that say what next."""
    out, text = continuous
    lines = read_lines(out / "metrics.jsonl")
    assert [line["update"] for line in lines] == [1, 2, 3, 4] == [line["weight_version"] for line in lines]
    assert all(line.keys() >= KEYS for line in lines)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["iter_0000000", "iter_0000002", "iter_0000004", "latest"]
    for update in range(1, 5):
        samples = read_lines(out / "rollouts" / f"update_{update:07d}.jsonl")
        assert len(samples) == 64 and all(sample.keys() >= ROLLOUT_KEYS for sample in samples)
        assert {tuple(sample["weight_version"].values()) for sample in samples} == {(1, update - 1)}
        assert len({sample["seed"] for sample in samples}) == 64
    assert [line.split(":")[0] for line in text.splitlines()[-3:]] == ["run", "resume", "export"]
    wait_until(lambda: not processes_of(out), seconds=30, what="the last process of a finished run")


def test_a_publication_says_where_its_seconds_went(continuous: tuple[Path, str]) -> None:
    """Every update has those of each phase beside all of them; none is counted twice."""
    for line in read_lines(continuous[0] / "metrics.jsonl"):
        phases = {name: line[name] for name in line if re.fullmatch("publish_.+_seconds", name)}
        print(phases, line["publish_seconds"])
        assert phases.keys() == {f"publish_{phase}_seconds" for phase in PUBLICATION}
        assert min(phases.values()) >= 0 and phases["publish_write_seconds"] > 0
        rounding = 0.5e-6 * (len(phases) + 1)  # each is told to the microsecond
        assert sum(phases.values()) <= line["publish_seconds"] + rounding


def test_objects_of_the_start_are_left_to_themselves(continuous: tuple[Path, str]) -> None:
    """The process freezes what it has made once, between its start and the first update's samples."""
    log = (continuous[0] / "logs" / "trainer_rank0.log").read_text()
    [(when, count)] = re.findall(r"^(\S+ \S+) INFO \S+: garbage collection leaves out (\d+) objects", log, re.MULTILINE)
    frozen_at = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    made_at = [
        (continuous[0] / name).stat().st_mtime for name in ("checkpoints/iter_0000000", "rollouts/update_0000001.jsonl")
    ]
    assert made_at[0] < frozen_at + 1e-3 and frozen_at < made_at[1]
    assert int(count) > 100_000, "the modules and the model are not among them"


def test_engine_of_a_killed_run_ends_by_itself(killed: Path) -> None:
    """Nothing is left behind that holds memory or a device."""
    wait_until(lambda: not processes_of(killed), seconds=30, what="the engine of the killed run")


def test_killed_and_resumed_equals_continuous(continuous: tuple[Path, str], resumed: Path) -> None:
    """Parameters, Adam moments and masters, metrics and samples are bitwise the same; only times differ."""
    assert_equal_runs(continuous[0], resumed, update=4)
    for update in range(1, 5):
        samples_of = [read_lines(out / "rollouts" / f"update_{update:07d}.jsonl") for out in (continuous[0], resumed)]
        incarnations = [{sample["weight_version"].pop("incarnation") for sample in samples} for samples in samples_of]
        assert incarnations == [{1}, {1 if update <= 2 else 2}], "a resume opens a new incarnation"
        assert samples_of[0] == samples_of[1]


@pytest.mark.usefixtures("megatron")
def test_served_export_scores_as_the_trainer_does(continuous: tuple[Path, str]) -> None:
    """vLLM serves OUT/hf with the trainer's log-probs at every depth, within rounding of the trained weights."""
    hf = continuous[0] / "hf"
    outcomes = rollouts(hf, "plain", (MIXED,))
    assert isinstance(outcomes, dict), outcomes
    rows, trainer = outcomes[MIXED].rows, trainer_for(hf, torch.float32)
    scores = trainer_logprobs(trainer, rows, recorded)
    own, off = rounding_of(hf, torch.float32, rows, scores), differences(rows, scores)
    wrong = differences(rows, trainer_logprobs(trainer, rows, uniform))
    print(f"engine against trainer: {summary(off)}\ntrainer against fp64: {summary(own)}")
    # Rounding grows with trained weights: the trainer's own fp32 error is the yardstick (DESIGN.md).
    assert within(off, own)
    assert not within(wrong, own), "the bound would let a replay at the wrong depth pass"
