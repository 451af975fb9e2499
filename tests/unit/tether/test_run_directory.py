"""OUT: who may use it, and what a resume leaves of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tether.run_contract import check_contract, digest_files, run_contract
from tether.run_directory import RunDirectory, read_json_lines
from tether.settings import Settings


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that was killed in update 5, its last checkpoint being that of update 2."""
    directory = RunDirectory(tmp_path / "run")
    directory.create({"contract": {"lr": 1.0}})
    for update in range(1, 5):
        directory.write_rollouts(update, [{"reward": update}])
        directory.append_metrics({"update": update, "loss": update / 10})
    directory.write_rollouts(5, [{"reward": 5}])
    return directory


def test_a_run_directory_belongs_to_one_run(run: RunDirectory, tmp_path: Path) -> None:
    """Another run, anything else, and a file are each refused; a new or an empty directory is fine."""
    with pytest.raises(ValueError, match="holds another run; add --resume"):
        run.check_free()
    (tmp_path / "other").mkdir()
    RunDirectory(tmp_path / "other").check_free()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"not empty \(notes.txt\)"):
        RunDirectory(tmp_path / "other").check_free()
    with pytest.raises(ValueError, match="a file is in the way"):
        RunDirectory(tmp_path / "other" / "notes.txt").check_free()
    RunDirectory(tmp_path / "new").check_free()


def test_another_process_of_the_start_may_be_first(tmp_path: Path) -> None:
    """Its log is in OUT when rank 0 looks; any other file there is not of this start."""
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    directory.trainer_log(1).touch()
    directory.check_free()
    (directory.logs / "engine.log").touch()
    with pytest.raises(ValueError, match=r"not empty \(logs\)"):
        directory.check_free()


def test_only_a_run_can_be_resumed(run: RunDirectory, tmp_path: Path) -> None:
    """A missing or damaged run.json is told apart."""
    assert run.read_run() == {"contract": {"lr": 1.0}}
    with pytest.raises(ValueError, match="no run to resume"):
        RunDirectory(tmp_path / "nothing").read_run()
    run.run_file.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        run.read_run()
    run.run_file.write_text("[]")
    with pytest.raises(ValueError, match="no run contract"):
        run.read_run()


def test_resume_cuts_back_to_the_checkpoint(run: RunDirectory) -> None:
    """Metrics and rollouts past the checkpoint go, those up to it stay byte for byte."""
    kept = run.metrics_file.read_text().splitlines()[:2]
    run.cut_back(2, {"update": 2, "loss": -1})
    assert run.metrics_file.read_text().splitlines() == kept
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["update_0000001.jsonl", "update_0000002.jsonl"]


def test_resume_restores_the_line_that_the_checkpoint_was_killed_before(run: RunDirectory) -> None:
    """A run killed between its checkpoint and the line of metrics after it loses neither."""
    run.metrics_file.write_text("".join(run.metrics_file.read_text().splitlines(keepends=True)[:1]))
    run.cut_back(2, {"update": 2, "loss": 0.2})
    assert [line["update"] for line in read_json_lines(run.metrics_file)] == [1, 2]


def test_a_half_written_last_line_is_dropped_and_any_other_is_an_error(run: RunDirectory) -> None:
    """A crash can cut the last line only."""
    whole = run.metrics_file.read_text()
    run.metrics_file.write_text(whole + '{"update": 5, "lo')
    assert [line["update"] for line in read_json_lines(run.metrics_file)] == [1, 2, 3, 4]
    run.metrics_file.write_text("{\n" + whole)
    with pytest.raises(ValueError, match="metrics.jsonl:1: damaged line"):
        run.cut_back(2, None)


def test_a_start_without_any_line_is_cut_back_to_nothing(run: RunDirectory) -> None:
    """A run killed before its first update resumes at 0."""
    run.cut_back(0, None)
    assert run.metrics_file.read_text() == "" and not list(run.rollouts.iterdir())


def contract(tmp_path: Path, **changes: object) -> dict:
    from tether.rewards import exact_match

    settings = Settings(**changes)  # type: ignore[arg-type]
    return run_contract(model=tmp_path, data=[tmp_path / "data.jsonl"], settings=settings, reward=exact_match)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "data.jsonl"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "data.jsonl"])
def test_contract_notices_a_changed_file(model: Path, name: str) -> None:
    """Model, tokenizer and data are compared by content."""
    before = contract(model)
    (model / name).write_text("changed!")
    assert len([key for key, value in contract(model).items() if value != before[key]]) == 1


def test_contract_names_every_differing_field_with_both_values(model: Path) -> None:
    """What computes the result must be equal; where it computes and what it keeps may change."""
    saved = json.loads(json.dumps(contract(model)))
    check_contract(saved=saved, now=contract(model, save_every=7, rollout_devices=2, keep_rollouts=False), where=model)
    with pytest.raises(ValueError) as refused:
        check_contract(saved=saved, now=contract(model, lr=0.5, depth="fixed:2"), where=model)
    assert "lr: the run has 1e-06, now 0.5" in str(refused.value)
    assert "depth: the run has 'full', now 'fixed:2'" in str(refused.value)
    assert "updates" not in saved


def test_file_digests_depend_on_names_and_boundaries(tmp_path: Path) -> None:
    """Bytes that move from one file to the next change the digest."""
    one, two = tmp_path / "1", tmp_path / "2"
    digests = set()
    for first, second in (("ab", "c"), ("a", "bc"), ("abc", "")):
        one.write_text(first)
        two.write_text(second)
        digests.add(digest_files([one, two]))
    digests.add(digest_files([two, one]))
    assert len(digests) == 4
