"""The files of a checkpoint directory: staging, completeness, the pointer, removal. No tensor and no Megatron here.

A directory named iter_NNNNNNN appears by one rename of a synced staging directory, so it is complete when it appears;
its tether.json lists the sizes of all files, so that one damaged later (a copy cut short) is recognised.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DESCRIPTION = "tether.json"
POINTER = "latest"
_NAME = re.compile(r"iter_\d{7,}")


def final_name(directory: Path, update: int) -> Path:
    """DIRECTORY/iter_0000004."""
    return Path(directory) / f"iter_{update:07d}"


def staging_name(directory: Path, update: int) -> Path:
    """DIRECTORY/.iter_0000004.partial: never taken for a checkpoint."""
    return Path(directory) / f".iter_{update:07d}.partial"


def prepare(staging: Path) -> None:
    """An empty staging directory. What killed saves and removals left beside it goes."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    for left in [*staging.parent.glob(".iter_*.partial"), *staging.parent.glob(".iter_*.removed")]:
        shutil.rmtree(left)
    staging.mkdir()


def commit(staging: Path, final: Path, description: dict[str, Any], *, keep: int = 0) -> None:
    """Makes the staged files the newest checkpoint, durably, then removes older ones than the `keep` newest (0: none).

    A checkpoint of the same name is replaced.
    """
    sizes = {str(p.relative_to(staging)): p.stat().st_size for p in sorted(staging.rglob("*")) if p.is_file()}
    (staging / DESCRIPTION).write_text(json.dumps({**description, "files": sizes}, indent=1) + "\n")
    for path in [*staging.rglob("*"), staging]:
        _sync(path)
    if final.exists():
        _remove(final)
    staging.rename(final)
    _point(final)
    if keep:
        for old in complete_checkpoints(final.parent)[:-keep]:
            if old != final:
                _remove(old)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Oldest first."""
    found = [p for p in Path(directory).glob("iter_*") if _NAME.fullmatch(p.name) and not problem(p)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def latest(directory: Path) -> Path | None:
    """The checkpoint that the pointer names or, if it names none that is complete, the newest complete one."""
    directory = Path(directory)
    for path in sorted(directory.glob("iter_*")):
        if _NAME.fullmatch(path.name) and (why := problem(path)):
            logger.warning("%s is not a complete checkpoint and is ignored: %s", path, why)
    pointer, complete = directory / POINTER, complete_checkpoints(directory)
    if pointer.is_file():
        named = directory / pointer.read_text().strip()
        if named in complete:
            return named
        logger.warning("%s names %r, which is no complete checkpoint; taking the newest that is", pointer, named.name)
    return complete[-1] if complete else None


def problem(path: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None if it is."""
    try:
        sizes = read_description(path)["files"]
    except ValueError as error:
        return str(error)
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name}: got {file.stat().st_size if file.is_file() else 'no file'}, expected {size} bytes"
    return None


def read_description(path: Path) -> dict[str, Any]:
    """tether.json of a checkpoint.

    Raises:
        ValueError: it is missing or not JSON.
    """
    file = Path(path) / DESCRIPTION
    try:
        description = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(description, dict) or not isinstance(description.get("files"), dict):
        raise ValueError(f"{file}: not the description of a checkpoint")
    return description


def _point(final: Path) -> None:
    """Replaces the pointer in one step: it names the old checkpoint or the new one, at any moment."""
    staged = final.parent / f".{POINTER}.partial"
    staged.write_text(final.name + "\n")
    _sync(staged)
    _sync(final.parent)  # the rename of the checkpoint, before anything names it
    staged.replace(final.parent / POINTER)
    _sync(final.parent)


def _remove(path: Path) -> None:
    """Takes the name away first: a kill in between must not leave half a checkpoint under it."""
    doomed = path.with_name(f".{path.name}.removed")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
