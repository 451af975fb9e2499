"""Completeness of checkpoint directories: what a kill at any moment leaves, and what is chosen afterwards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from adapters.megatron import checkpoint_files as files


def write(directory: Path, update: int, *, text: str = "weights", **retention: int) -> Path:
    """One small checkpoint through the real steps."""
    staging, final = files.staging_name(directory, update), files.final_name(directory, update)
    files.prepare(staging)
    (staging / "data").mkdir()
    (staging / "data" / "shard").write_text(text)
    facts = files.facts(staging, files.names_in(staging))
    files.commit(staging, final, {"update": update}, facts, retention=files.Retention(**retention))
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
    """`keep_last` counts complete checkpoints, the new one included; 0 keeps all."""
    for update in range(5):
        write(tmp_path, update, keep_last=2)
    assert names(tmp_path) == {"iter_0000003", "iter_0000004", "latest"}


def test_milestones_stay(tmp_path: Path) -> None:
    """`keep_every` keeps the checkpoints of every so many updates for good, besides the newest."""
    for update in range(1, 9):
        write(tmp_path, update, keep_last=2, keep_every=3)
    assert names(tmp_path) == {"iter_0000003", "iter_0000006", "iter_0000007", "iter_0000008", "latest"}


def test_kill_while_writing(tmp_path: Path) -> None:
    """A staging directory is never chosen, and the next save clears it away."""
    write(tmp_path, 1)
    staging = files.staging_name(tmp_path, 2)
    files.prepare(staging)
    (staging / "shard").write_text("half")
    assert staging != files.staging_name(tmp_path, 2), "a saver that outlives its run must not meet the next one's"
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


@pytest.mark.parametrize("has_replacement", [False, True])
def test_kill_while_replacing(tmp_path: Path, has_replacement: bool) -> None:
    """A checkpoint saved again stays until the new one has its name: of the two renames the second may be missing."""
    old = write(tmp_path, 1, text="old")
    old.rename(tmp_path / ".iter_0000001.replaced")
    if has_replacement:
        write(tmp_path / "elsewhere", 1, text="new").rename(old)
    assert files.latest(tmp_path) == old
    assert (old / "data" / "shard").read_text() == ("new" if has_replacement else "old")
    assert not list(tmp_path.glob(".iter*"))


DAMAGE = {
    "cut short": lambda path: (path / "data" / "shard").write_text("wei"),
    "missing file": lambda path: (path / "data" / "shard").unlink(),
    "no description": lambda path: (path / files.DESCRIPTION).unlink(),
    "broken description": lambda path: (path / files.DESCRIPTION).write_text("{"),
    "no directory": lambda path: path.rename(path.with_name("elsewhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("has_pointer", [True, False])
def test_a_damaged_newest_is_named_and_the_previous_one_offered(tmp_path: Path, damage: str, has_pointer: bool) -> None:
    """It is never replaced unasked by an older one, with which training would silently lose updates."""
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    DAMAGE[damage](newest)
    if not has_pointer:
        (tmp_path / "latest").unlink()
        if damage == "no directory":
            return  # nothing says that there ever was one
    with pytest.raises(ValueError, match="iter_0000002: damaged checkpoint, .*iter_0000001.*--resume-from 1"):
        files.latest(tmp_path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Sizes alone would let it pass; digests do not."""
    path = write(tmp_path, 1)
    (path / "data" / "shard").write_text("weighTs")
    assert files.problem(path) is None
    assert files.problem(path, deep=True) == "data/shard: its bytes have changed since they were written"
    with pytest.raises(ValueError, match="there is no other complete one"):
        files.require_whole(path, deep=True)


def test_going_back_sets_newer_ones_aside(tmp_path: Path) -> None:
    """An older one becomes the newest; what was newer is kept under another name, also the second time."""
    for _ in range(2):
        old = write(tmp_path, 1)
        write(tmp_path, 2)
        files.go_back_to(old)
        assert files.latest(tmp_path) == old and files.checkpoints(tmp_path) == [old]
    assert names(tmp_path) == {"iter_0000001", "iter_0000002.set_aside", "latest"}


def test_undescribed_files_are_not_committed(tmp_path: Path) -> None:
    """A file that no rank answers for is an error, and nothing is committed."""
    staging = files.staging_name(tmp_path, 1)
    files.prepare(staging)
    (staging / "shard").write_text("x")
    with pytest.raises(RuntimeError, match="nothing was committed"):
        files.commit(staging, files.final_name(tmp_path, 1), {}, {})
    assert files.latest(tmp_path) is None


def test_a_lost_pointer_is_survived(tmp_path: Path) -> None:
    """Without the pointer the newest checkpoint is taken; other names are no checkpoints."""
    write(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "iter_backup").mkdir()
    assert files.latest(tmp_path) == tmp_path / "iter_0000001"


def test_description_lists_every_file(tmp_path: Path) -> None:
    """tether.json carries what was given, and size and digest of each file, also in subfolders."""
    description = json.loads((write(tmp_path, 7) / files.DESCRIPTION).read_text())
    want = hashlib.blake2b(b"weights", digest_size=16).hexdigest()
    assert description == {"update": 7, "files": {"data/shard": [7, want]}}
