"""What a person sees: one plain line per update away from a terminal, and three lines that say what next."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tether.progress import PHASES, Progress, closing_lines, last_lines, stopped_lines
from tether.settings import RunArguments, Settings, parse, to_argv

METRICS = {"update": 2, "reward_mean": 0.5, "loss": 0.01, "logprob_diff_mean": 2e-7, "logprob_diff_max": 1e-6}
ARGUMENTS = RunArguments(
    model=Path("m"), data=Path("d.jsonl"), out=Path("my run"), updates=4, settings=Settings(lr=1e-3, diagnose=True)
)


def test_plain_lines_show_reward_loss_difference_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file gets readable lines, not a bar's control characters."""
    with Progress(total=4, done=1) as progress:
        progress.show(METRICS | {f"{phase}_seconds": 1.5 for phase in PHASES})
    text = capsys.readouterr().err
    assert text.startswith("update 2/4  reward 0.500  loss +1.00e-02  score diff 2.0e-07 (max 1.0e-06)")
    assert "rollout/train/publish/save 1.5/1.5/1.5/1.5 s" in text and "\r" not in text


def test_closing_lines_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that resumes asks for the same run: only the number of updates and the switch differ."""
    monkeypatch.delenv("TETHER_RECIPE", raising=False)
    run, resume, export = closing_lines(ARGUMENTS).splitlines()
    assert run.startswith("run:") and "'my run'" in run
    argv = shlex.split(resume.partition("-m tether.train ")[2])
    assert parse(argv) == dataclasses.replace(ARGUMENTS, updates=8, resume=True)
    assert shlex.split(export)[-4:] == ["tether.convert", "export", "my run", "HF_DIR"]


def test_a_recipe_says_how_it_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """run.sh has arguments of its own."""
    monkeypatch.setenv("TETHER_RECIPE", "examples/ouro/run.sh --out x")
    assert "resume: examples/ouro/run.sh --out x --updates 8 --resume" in closing_lines(ARGUMENTS)


def test_a_run_without_checkpoints_offers_no_resume() -> None:
    """Neither at its end nor when it was stopped."""
    arguments = replace(ARGUMENTS, settings=ARGUMENTS.settings.replace(save_every=0))
    for text in (closing_lines(arguments), stopped_lines(arguments, 2, "signal 15")):
        assert "resume" not in text and "save_every=0" in text


def test_argv_of_settings_reads_back() -> None:
    """Every kind of value survives the way through the command line."""
    settings = Settings(seed=3, lr=2e-5, depth="cycle:3,4", recompute=True, keep_rollouts=False)
    arguments = dataclasses.replace(ARGUMENTS, settings=settings)
    assert parse([*to_argv(arguments), "--updates", "4"]) == arguments


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    """An error shows the end of the guilty log, and nothing when there is none."""
    (tmp_path / "engine.log").write_text("".join(f"line {i}\n" for i in range(40)))
    text = last_lines(tmp_path / "engine.log", count=2)
    assert text.splitlines()[1:] == ["  line 38", "  line 39"]
    assert last_lines(tmp_path / "none.log") == ""
