"""The files beside the weights: which of a model directory's go along with an export, and what changes in them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.hf_convert.directory import CONFIG, read_json

RECORD = "tether_export.json"
"""Marks a directory as an export; `export.py` says what it holds."""
CODE = "*.py"
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "additional_chat_templates/*.jinja")
"""Config, generation config, tokenizer, chat templates. No weights, no model card of another model."""


@dataclass(frozen=True, kw_only=True)
class SideFiles:
    """How the files beside the weights differ from the source's. What is not named here is copied byte for byte."""

    updates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Entries to set in a JSON file of the source by file name; None takes an entry out. A missing file stays missing,
    and a file in which nothing changes stays as it is to the byte."""
    code: tuple[Path, ...] | None = None
    """Python files instead of the source's own; None keeps those, () leaves all out."""


def copy_side_files(source: Path, staging: Path, side: SideFiles) -> dict[str, str]:
    """Copies what goes along, changed as asked. Returns the SHA-256 of each file that only changes on purpose.

    config.json is left out of those: what it says is compared entry by entry.
    """
    read_json(source / CONFIG)  # an error that names the file, before anything is written
    for pattern in (*COPIED, *([CODE] if side.code is None else [])):
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".index.json") and file.name != RECORD:
                target = staging / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    for file in side.code or ():
        shutil.copyfile(file, staging / file.name)
    for name, entries in side.updates.items():
        _update(staging / name, entries)
    return digests(staging)


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of a directory's side files by path within it, config.json and the record left out."""
    files = [file for pattern in (*COPIED, CODE) for file in directory.glob(pattern) if file.is_file()]
    names = {str(file.relative_to(directory)): file for file in files if not file.name.endswith(".index.json")}
    return {n: hashlib.sha256(names[n].read_bytes()).hexdigest() for n in sorted(names.keys() - {CONFIG, RECORD})}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _update(path: Path, entries: Mapping[str, Any]) -> None:
    if not path.is_file():
        return
    old = read_json(path)
    new = {key: value for key, value in {**old, **entries}.items() if value is not None or key not in entries}
    if new != old:
        write_json(path, new)
