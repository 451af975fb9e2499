"""The whole matrices of layouts and of resumes. Part of make test-all.

    python -m tests.layouts.matrix

Writes benchmarks/results/layout_matrix_cpu.json and exits 1 if a cell fails.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import record

from .cases import CROSSING, LAYOUTS, WRITE
from .checks import BOUND, check_crossing, check_layout, check_resume
from .ranks import CELLS, RESUME_LAYOUTS, launch


def main() -> int:
    record.commit()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in LAYOUTS:
            WRITE[model](folder / model)
            run_layouts(folder, model)
            run_resumes(folder, model)
            cells += [cell for cell in check_all(folder, model)]
    failed = [cell for cell in cells if not cell["ok"]]
    path = record.write(
        "layout_matrix_cpu",
        command="python -m tests.layouts.matrix",
        settings={"models": "tiny, std 0.02", "bound": BOUND, "backend": "gloo", "updates": "6 = 3 + 3"},
        results={"cells": cells, "passed": len(cells) - len(failed), "failed": len(failed)},
    )
    print(f"{len(cells) - len(failed)} passed, {len(failed)} failed: {path}")
    return bool(failed)


def run_layouts(folder: Path, model: str) -> None:
    """Every layout measured; then the crossing ones load what each of them saved."""
    for kind, chosen in (("measure", LAYOUTS[model]), ("cross", CROSSING[model])):
        for world in sorted({LAYOUTS[model][name].world for name in chosen}):
            names = [name for name in chosen if LAYOUTS[model][name].world == world]
            launch([f"{kind}.{model}.{name}" for name in names], folder=folder, world=world, deadline_seconds=900)


def run_resumes(folder: Path, model: str) -> None:
    """Six updates in one go, and in fresh processes three more from the third."""
    for kind in ("whole", "resumed"):
        for world in RESUME_LAYOUTS[model]:
            stages = [f"{kind}.{model}.{world}.{cell}" for cell in CELLS]
            launch(stages, folder=folder, world=int(world), deadline_seconds=900)


def check_all(folder: Path, model: str) -> Iterator[dict[str, Any]]:
    for name in list(LAYOUTS[model])[1:]:
        yield _cell({"model": model, "check": "layout", "layout": name}, lambda n=name: check_layout(folder, model, n))
    for source in CROSSING[model]:
        for target in CROSSING[model]:
            key = {"model": model, "check": "crossing", "saved_at": source, "loaded_at": target}
            yield _cell(key, lambda s=source, t=target: check_crossing(folder, model, s, t))
    for world in RESUME_LAYOUTS[model]:
        for cell in CELLS:
            key = {"model": model, "check": "resume", "processes": int(world), "cell": cell}
            yield _cell(key, lambda w=world, c=cell: check_resume(folder, model, w, c))


def _cell(key: dict[str, Any], check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        cell = {**key, "ok": True, **check()}
    except AssertionError as error:
        cell = {**key, "ok": False, "error": str(error)[:500]}
    print(cell, flush=True)
    return cell


if __name__ == "__main__":
    sys.exit(main())
