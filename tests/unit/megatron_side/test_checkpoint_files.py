"""Completeness of checkpoint directories: what a kill at any moment leaves, and what is chosen afterwards."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from adapters.megatron import checkpoint_files as files


def write(directory: Path, update: int, *, keep: int = 0, text: str = "weights") -> Path:
    """One small checkpoint through the real steps."""
    staging, final = files.staging_name(directory, update), files.final_name(directory, update)
    files.prepare(staging)
    (staging / "data").mkdir()
    (staging / "data" / "shard").write_text(text)
    files.commit(staging, final, {"update": update}, keep=keep)
    return final


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_pointer_names_the_newest(tmp_path: Path) -> None:
    """Each commit moves the pointer; nothing else is left in the directory."""
    assert files.latest(tmp_path / "missing") is None and files.latest(tmp_path) is None
    for update in (0, 2, 4):
        assert files.latest(write(tmp_path / "c", update).parent) == tmp_path / "c" / f"iter_{update:07d}"
    assert names(tmp_path / "c") == {"iter_0000000", "iter_0000002", "iter_0000004", "latest"}


def test_older_ones_go_after_the_new_one_is_complete(tmp_path: Path) -> None:
    """`keep` counts complete checkpoints, the new one included; 0 keeps all."""
    for update in range(5):
        write(tmp_path, update, keep=2)
    assert names(tmp_path) == {"iter_0000003", "iter_0000004", "latest"}


def test_kill_while_writing(tmp_path: Path) -> None:
    """A staging directory is never chosen, and the next save clears it away."""
    write(tmp_path, 1)
    files.prepare(files.staging_name(tmp_path, 2))
    (files.staging_name(tmp_path, 2) / "shard").write_text("half")
    assert files.latest(tmp_path) == tmp_path / "iter_0000001"
    write(tmp_path, 3)
    assert names(tmp_path) == {"iter_0000001", "iter_0000003", "latest"}


def test_kill_between_rename_and_pointer(tmp_path: Path) -> None:
    """The pointer decides; the run repeats the update and replaces the checkpoint that nothing named."""
    write(tmp_path, 1)
    write(tmp_path, 2, text="first")
    (tmp_path / "latest").write_text("iter_0000001\n")
    assert files.latest(tmp_path) == tmp_path / "iter_0000001"
    assert (write(tmp_path, 2, text="second") / "data" / "shard").read_text() == "second"
    assert files.latest(tmp_path) == tmp_path / "iter_0000002"


def test_kill_while_removing(tmp_path: Path) -> None:
    """A removal takes the name away first, so half a checkpoint is never under it; the next save clears it."""
    write(tmp_path, 1)
    (tmp_path / "iter_0000001").rename(tmp_path / ".iter_0000001.removed")
    write(tmp_path, 2)
    assert names(tmp_path) == {"iter_0000002", "latest"}


@pytest.mark.parametrize("damage", ["cut short", "missing file", "no description", "broken description"])
def test_damaged_checkpoints_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """The newest complete one is taken instead, and both the damage and the pointer are named."""
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    if damage == "cut short":
        (newest / "data" / "shard").write_text("wei")
    elif damage == "missing file":
        (newest / "data" / "shard").unlink()
    elif damage == "no description":
        (newest / files.DESCRIPTION).unlink()
    else:
        (newest / files.DESCRIPTION).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert files.latest(tmp_path) == tmp_path / "iter_0000001"
    assert "iter_0000002 is not a complete checkpoint and is ignored" in caplog.text
    assert "names 'iter_0000002', which is no complete checkpoint" in caplog.text


def test_a_lost_pointer_is_survived(tmp_path: Path) -> None:
    """Without the pointer the newest complete checkpoint is taken; other names are no checkpoints."""
    write(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "iter_backup").mkdir()
    assert files.latest(tmp_path) == tmp_path / "iter_0000001"


def test_description_lists_every_file(tmp_path: Path) -> None:
    """tether.json carries what was given and the size of each file, also in subfolders."""
    description = json.loads((write(tmp_path, 7) / files.DESCRIPTION).read_text())
    assert description == {"update": 7, "files": {"data/shard": 7}}
