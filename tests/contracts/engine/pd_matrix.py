"""Every phase x every loss of a worker, on real vLLM and NIXL, one or several of each role. Part of make test-all.

    python -m tests.contracts.engine.pd_matrix [--engine ouro:1P2D ...] [--phase decode ...]

Writes benchmarks/results/pd_faults_cpu.json, from which `python -m benchmarks.tables` makes the table of
docs/disaggregated.md, and exits 1 if a cell fails. A part of the matrix replaces that part of the record; each cell
names the commit that it was seen at.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

from .conftest import MODELS
from .pd_cells import DEADLINE, HEARTBEAT, all_cells, check, stand

ENGINES = ("ouro:1P1D", "ouro:2P1D", "ouro:1P2D", "olmoe:1P1D")
NAME, KEY = "pd_faults_cpu", ("model", "engine", "phase", "fault")
Cells = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="append", choices=ENGINES, help="default: all of them")
    parser.add_argument("--phase", action="append", help="cells whose phase begins so; default: all")
    options = parser.parse_args(argv)
    seen_at = record.commit()
    cells: Cells = []
    with tempfile.TemporaryDirectory() as name:
        for engine in options.engine or ENGINES:
            model, kind = engine.split(":")
            folder = Path(name) / engine.replace(":", "-")
            models = {key: MODELS[model](folder / key, seed=seed) for seed, key in enumerate("AB")}
            phases = tuple(options.phase or [""])
            wanted = [c for c in all_cells(kind, short=engine != ENGINES[0]) if c[0].startswith(phases)]
            cells += [{"model": model, **cell, "commit": seen_at} for cell in run_all(kind, models, folder, wanted)]
    path = write(cells)
    failed = [cell for cell in cells if not cell["ok"]]
    print(f"{len(cells) - len(failed)} passed, {len(failed)} failed: {path}", *failed, sep="\n")
    return bool(failed)


def write(cells: Cells) -> Path:
    """The record, with these cells in the place of the same ones seen before."""
    path = record.RESULTS / f"{NAME}.json"
    before = json.loads(path.read_text())["results"]["cells"] if path.exists() else []
    merged = list({tuple(cell[name] for name in KEY): cell for cell in (*before, *cells)}.values())
    passed = sum(cell["ok"] for cell in merged)
    return record.write(
        NAME,
        command="python -m tests.contracts.engine.pd_matrix",
        settings={"deadline_seconds": DEADLINE, "heartbeat_seconds": HEARTBEAT},
        results={"cells": merged, "passed": passed, "failed": len(merged) - passed},
    )


def run_all(kind: str, models: dict[str, Path], folder: Path, left: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Every cell on one engine, which later cells find as earlier ones left it. A failed cell starts another engine."""
    cells: list[dict[str, Any]] = []
    while left:
        with stand(kind, models, folder) as stood:
            while left:
                phase, fault = left.pop(0)
                try:
                    cells.append({"ok": True, **check(stood, phase, fault)})
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"[:500]
                    cells.append({"ok": False, "engine": kind, "phase": phase, "fault": fault, "error": message})
                print(cells[-1], flush=True)
                if not cells[-1]["ok"]:
                    break
    return cells


if __name__ == "__main__":
    sys.exit(main())
