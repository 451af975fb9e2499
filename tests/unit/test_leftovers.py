"""What a killed process left is removed; what somebody may still use is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapters.vllm_engine.memory import leftovers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leftovers, "memory_directory", lambda: tmp_path)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_only_files_of_dead_owners_are_removed(folder: Path) -> None:
    """A dead owner's file and folder go. A live owner's, another namespace's, a stranger's stay."""
    program = "from adapters.vllm_engine.memory.leftovers import *; print(owned_name(WEIGHTS), owned_name(ENGINE))"
    dead = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    (folder / dead[0]).write_text("x")
    (folder / dead[1]).mkdir()
    (folder / dead[1] / "socket").write_text("x")
    head, _, tail = dead[0].rpartition(".")
    kept = [leftovers.owned_name(leftovers.WEIGHTS), f"{head}.1-{tail.partition('-')[2]}", "tether-notes", "other"]
    for name in kept:
        (folder / name).write_text("x")
    assert {path.name for path in leftovers.remove_abandoned()} == set(dead)
    assert {path.name for path in folder.iterdir()} == set(kept)


def test_a_pid_that_came_back_is_not_the_owner(folder: Path) -> None:
    """This process did not exist when the file was named: same pid, another start time."""
    name = leftovers.owned_name(leftovers.WEIGHTS)
    kind_pid, started, rest = name.rsplit("-", 2)[0], *name.rsplit("-", 2)[1:]
    stale = f"{kind_pid}-1{started}-{rest}"
    (folder / stale).write_text("x")
    assert [path.name for path in leftovers.remove_abandoned()] == [stale]
