"""Settings: defaults, checks, the parser, and what --help says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tether.learn import grpo_settings
from tether.learning_settings import PRESETS
from tether.settings import RunArguments, Settings, describe, from_pairs, parse, settings_table

REQUIRED = ["--model", "M", "--data", "D", "--out", "O", "--updates", "4"]


def test_defaults_are_valid_and_every_field_is_described() -> None:
    """Each setting has the line under its field that --help prints, and no other text slips in."""
    names = [field.name for field in dataclasses.fields(Settings)]
    assert list(describe(Settings)) == names
    assert list(describe(RunArguments)) == [field.name for field in dataclasses.fields(RunArguments)]
    lines = settings_table(Settings()).splitlines()
    assert [line.split("=")[0].strip() for line in lines] == names


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is the documentation of the settings."""
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for field in dataclasses.fields(Settings):
        value = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert f"{field.name}={value}" in text, field.name


def test_parser_reads_everything() -> None:
    """Paths, switches and typed settings; of a repeated key the later one counts."""
    got = parse([*REQUIRED, "--resume", "--set", "lr=1e-3", "--set", "recompute=True", "--set", "lr=2e-3"])
    assert (got.model, got.data, got.out, got.updates) == (Path("M"), Path("D"), Path("O"), 4)
    assert got.resume and not got.dry_run
    assert got.settings == Settings(lr=2e-3, recompute=True)
    got = parse([*REQUIRED, "--resume-from", "3", "--allow-change", "lr", "--allow-change", "seed"])
    assert got.resume and got.resume_from == 3 and got.allow_change == ("lr", "seed")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("learning_rate=1", "expected key=value with a key of"),
        ("lr", "expected key=value"),
        ("lr=fast", "expected a number"),
        ("seed=1.5", "expected an integer"),
        ("recompute=1", "expected true or false"),
        ("lr=0", "lr: got 0.0, expected a finite number > 0"),
        ("lr=nan", "lr: got nan"),
        ("temperature=0", "temperature: got 0.0"),
        ("group_size=1", "group_size: got 1, expected an integer >= 2"),
        ("kl=-1", "kl: got -1.0, expected a finite number >= 0"),
        (
            "reference_scorer=engine",
            "reference_scorer: got 'engine', expected one of trainer, engine; trainer when",
        ),
        ("peak_flops=-1", "peak_flops: got -1.0, expected a finite number >= 0"),
        ("kl_in=nowhere", "kl_in: got 'nowhere', expected one of loss, reward"),
        ("top_p=0.9", "top_p: got 0.9, expected 1: trained log-probs are over the whole vocabulary"),
        ("top_k=20", "top_k: got 20, expected 0: trained"),
        ("truncated=drop", "truncated: got 'drop', expected one of count, mask"),
        ("preset=ppo", "expected one of cispo, dapo, dr_grpo, grpo, gspo, rloo"),
        ("dtype=float16", "dtype: got 'float16', expected one of auto, float32, bfloat16"),
        ("engine=remote", "engine: got 'remote'"),
        ("reward=exact_match", "expected module:function"),
        ("depth=deep", "depth: got 'deep'"),
        ("depth=cycle:3,,2", "depth: got 'cycle:3,,2'"),
        ("depth=cycle:0", "depth: got 'cycle:0'"),
        ("save_format=fast", "save_format: got 'fast', expected one of reshardable, same_layout"),
        ("stop_after_seconds=-1", "stop_after_seconds: got -1.0"),
        ("overlap_param_gather=true", "expected true only with overlap_grad_reduce and distributed_optimizer"),
    ],
)
def test_wrong_settings_are_refused_with_what_was_expected(pair: str, message: str) -> None:
    """Every error says what it got and what it expected."""
    with pytest.raises(ValueError) as refused:
        from_pairs([pair])
    assert message in str(refused.value)


def test_all_wrong_settings_are_named_in_one_message() -> None:
    """One run shows every mistake."""
    with pytest.raises(ValueError) as refused:
        Settings(lr=-1, group_size=0, kl=-1, depth="x")
    assert all(name in str(refused.value) for name in ("lr:", "group_size:", "kl:", "depth:"))


def test_command_line_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line is a usage error, not a traceback."""
    for argv in (
        [*REQUIRED, "--set", "lr=x"],
        REQUIRED[:-1] + ["0"],
        REQUIRED[:-2],
        [*REQUIRED, "--allow-change", "lr"],
    ):
        with pytest.raises(SystemExit) as stopped:
            parse(argv)
        assert stopped.value.code == 2
    assert "expected at least 1" in capsys.readouterr().err


def test_presets_stand_for_settings_and_yield_to_those_given() -> None:
    """Wherever the preset stands in the command line; and every preset is one that the loss accepts."""
    got = from_pairs(["clip_high=0.3", "preset=dapo", "seed=4"])
    assert (got.clip_high, got.drop_uninformative, got.truncated, got.seed) == (0.3, True, "mask", 4)
    for name in PRESETS:
        grpo_settings(from_pairs([f"preset={name}"]))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("loss=ppo", "loss: got 'ppo'"),
        ("loss=gspo", "gspo's ratio is one of whole sequences"),
        ("mismatch=often", "correction: got 'often'"),
        ("old_policy=rollout", "the ratio has it in already"),
        ("clip_low=2", "clip_low: got 2.0, expected in (0, 1]"),
    ],
)
def test_losses_that_do_not_go_together_are_refused(pair: str, message: str) -> None:
    """`prepare` builds the loss before anything heavy starts."""
    with pytest.raises(ValueError) as refused:
        grpo_settings(from_pairs([pair]))
    assert message in str(refused.value)
