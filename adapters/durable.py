"""Files that a crash of the machine does not take back."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Forces a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Forces all files below and then the directory to disk: a rename of it must not outlive its content."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old or the new one, never a part."""
    staging = path.with_name(path.name + ".staging")
    staging.write_text(text, encoding="utf-8")
    sync(staging)
    staging.replace(path)
    sync(path.parent)
