"""Every phase x every loss of a worker, on real vLLM and NIXL, one or several of each role. Part of make test-all.

    python -m tests.contracts.engine.pd_matrix

Writes benchmarks/results/pd_faults_cpu.json, from which `python -m benchmarks.tables` makes the table of
docs/disaggregated.md, and exits 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

from .conftest import MODELS
from .pd_cells import DEADLINE, HEARTBEAT, all_cells, check, stand

ENGINES = (("ouro", "1P1D"), ("ouro", "2P1D"), ("ouro", "1P2D"), ("olmoe", "1P1D"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cells whose phase begins so")
    only = parser.parse_args(argv).only
    if not only:
        record.commit()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for model, kind in ENGINES:
            folder = Path(name) / f"{model}-{kind}"
            models = {key: MODELS[model](folder / key, seed=seed) for seed, key in enumerate("AB")}
            short = (model, kind) != ENGINES[0]
            wanted = [cell for cell in all_cells(kind, short=short) if cell[0].startswith(only)]
            cells += [{"model": model, **cell} for cell in run_all(kind, models, folder, wanted)]
    failed = [cell for cell in cells if not cell["ok"]]
    print(f"{len(cells) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n")
    if not only:
        path = record.write(
            "pd_faults_cpu",
            command="python -m tests.contracts.engine.pd_matrix",
            settings={"engines": ENGINES, "deadline_seconds": DEADLINE, "heartbeat_seconds": HEARTBEAT},
            results={"cells": cells, "passed": len(cells) - len(failed), "failed": len(failed)},
        )
        print(path)
    return bool(failed)


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
