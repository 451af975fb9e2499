"""The files of a checkpoint directory: staging, completeness, the pointer, removal. No tensor and no Megatron here.

A directory named iter_NNNNNNN appears by one rename of a synced staging directory, so it is complete when it appears;
its tether.json lists size and digest of all files, so that one damaged later (cut short, a flipped bit) is recognised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters import threads
from adapters.durable import sync

logger = logging.getLogger(__name__)

DESCRIPTION = "tether.json"
POINTER = "latest"
_NAME = re.compile(r"iter_\d{7,}")
_CHUNK_BYTES = 4 << 20

FileFacts = Mapping[str, tuple[int, str]]
"""Size and digest of files by name."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay when a newer one is complete."""

    keep_last: int = 0
    """The newest ones, the new one included; 0 keeps all."""
    keep_every: int = 0
    """Those of every so many updates stay for good; 0 makes no exception."""

    def superseded(self, checkpoints: list[Path]) -> list[Path]:
        """Those to remove of checkpoints given oldest first."""
        if not self.keep_last:
            return []
        old = checkpoints[: -self.keep_last]
        return [path for path in old if not self.keep_every or number(path) % self.keep_every]


def final_name(directory: Path, update: int) -> Path:
    """DIRECTORY/iter_0000004."""
    return Path(directory) / f"iter_{update:07d}"


def staging_name(directory: Path, update: int) -> Path:
    """DIRECTORY/.iter_0000004.RANDOM.partial: never taken for a checkpoint, and no two savers share one.

    A process of a killed run that is still writing somewhere can therefore not write into a later run's files.
    """
    return Path(directory) / f".iter_{update:07d}.{secrets.token_hex(4)}.partial"


def number(path: Path) -> int:
    """The update in a checkpoint's name."""
    return int(path.name.removeprefix("iter_"))


def prepare(staging: Path) -> None:
    """An empty staging directory. What killed saves and removals left beside it goes."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    _put_back(staging.parent)
    for left in [*staging.parent.glob(".iter_*.partial"), *staging.parent.glob(".iter_*.removed")]:
        shutil.rmtree(left, ignore_errors=True)
    staging.mkdir()


def facts(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Syncs files to disk and reads back their sizes and digests."""

    names = list(names)
    for name in names:
        sync(directory / name)
    return {name: ((directory / name).stat().st_size, value) for name, value in _digests(directory, names).items()}


def _digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Digests of files by name. One that is missing or cannot be read is an OSError."""
    names = list(names)
    sizes = [(directory / name).stat().st_size for name in names]
    return dict(zip(names, threads.spread(lambda name: _digest(directory / name), names, sizes=sizes), strict=True))


def _digest(file: Path) -> str:
    """blake2b, 128 bits, in hexadecimal."""
    value = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value.update(chunk)
    return value.hexdigest()


def names_in(directory: Path) -> list[str]:
    """All files below a directory, sorted."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def commit(
    staging: Path, final: Path, description: dict[str, Any], files: FileFacts, *, retention: Retention | None = None
) -> None:
    """Makes the staged files the newest checkpoint, durably, then removes those that retention gives up.

    A checkpoint of the same name is replaced.

    Args:
        files: every file, already synced.

    Raises:
        RuntimeError: other files are there than were described; nothing was committed.
    """
    if sorted(files) != (found := names_in(staging)):
        raise RuntimeError(f"{staging}: got files {found[:10]}, expected {sorted(files)[:10]}; nothing was committed")
    (staging / DESCRIPTION).write_text(json.dumps({**description, "files": files}, indent=1) + "\n")
    for path in [staging / DESCRIPTION, *(path for path in staging.rglob("*") if path.is_dir()), staging]:
        sync(path)
    replaced = _replaced_name(final)
    if final.exists():
        final.rename(replaced)
    staging.rename(final)
    point(final)
    if replaced.exists():
        _remove(replaced)
    for old in (retention or Retention()).superseded(complete_checkpoints(final.parent)):
        if old != final:
            _remove(old)


def discard(staging: Path) -> None:
    """Frees what a failed save has written."""
    shutil.rmtree(staging, ignore_errors=True)


def checkpoints(directory: Path) -> list[Path]:
    """Everything named like a checkpoint, whole or not, oldest first."""
    return sorted((p for p in Path(directory).glob("iter_*") if _NAME.fullmatch(p.name)), key=number)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Those whose files are all there, oldest first."""
    return [path for path in checkpoints(directory) if not problem(path)]


def latest(directory: Path) -> Path | None:
    """The checkpoint that the pointer names, or without a pointer the newest; None if there is none at all.

    Raises:
        ValueError: that one is damaged. Names it and the newest complete one, which is never taken unasked.
    """
    directory = Path(directory)
    _put_back(directory)
    found, pointer = checkpoints(directory), directory / POINTER
    if not pointer.is_file():
        if not found:
            return None
        logger.warning("%s is missing; taking the newest checkpoint, %s", pointer, found[-1].name)
    chosen = directory / pointer.read_text().strip() if pointer.is_file() else found[-1]
    require_whole(chosen)
    return chosen


def require_whole(path: Path, *, deep: bool = False) -> None:
    """Raises ValueError, with the newest other complete checkpoint, if one is damaged. `deep` reads every byte."""
    if (why := problem(path, deep=deep)) is None:
        return
    others = [other for other in complete_checkpoints(path.parent) if other != path]
    offer = "there is no other complete one"
    if others:
        offer = (
            f"the newest other complete one is {others[-1].name}. Copy the damaged one again, or name the other: "
            f"--resume-from {number(others[-1])} to train on, or its directory to read it"
        )
    raise ValueError(f"{path}: damaged checkpoint, {why}; {offer}")


def go_back_to(path: Path) -> None:
    """Makes an older checkpoint the one to go on from. Newer ones are kept as iter_NNNNNNN.set_aside."""
    for newer in checkpoints(path.parent):
        if number(newer) > number(path):
            aside = newer.with_name(f"{newer.name}.set_aside")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)
    point(path)


def problem(path: Path, *, deep: bool = False) -> str | None:
    """Why a directory is not a complete checkpoint, or None if it is. `deep` compares digests too."""
    try:
        files = read_description(path)["files"]
    except ValueError as error:
        return str(error)
    for name, (size, _) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name}: got {file.stat().st_size if file.is_file() else 'no file'}, expected {size} bytes"
    changed = [name for name, value in _digests(path, files).items() if value != files[name][1]] if deep else []
    return f"{changed[0]}: its bytes have changed since they were written" if changed else None


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


def point(final: Path) -> None:
    """Replaces the pointer in one step: it names the old checkpoint or the new one, at any moment."""
    staged = final.parent / f".{POINTER}.partial"
    staged.write_text(final.name + "\n")
    sync(staged)
    sync(final.parent)  # the rename of the checkpoint, before anything names it
    staged.replace(final.parent / POINTER)
    sync(final.parent)


def _replaced_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _put_back(directory: Path) -> None:
    """A kill between the two renames of a replacement left the old checkpoint, whole, under another name."""
    for replaced in directory.glob(".iter_*.replaced"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if final.exists():
            _remove(replaced)
        else:
            replaced.rename(final)


def _remove(path: Path) -> None:
    """Takes the name away first: a kill in between must not leave half a checkpoint under it."""
    doomed = path.with_name(f".{path.name.removeprefix('.')}.removed")
    path.rename(doomed)
    shutil.rmtree(doomed)
