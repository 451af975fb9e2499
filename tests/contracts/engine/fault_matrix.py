"""The whole fault matrix on real vLLM, with one worker and with two. Part of make test-all.

    python -m tests.contracts.engine.fault_matrix

Writes benchmarks/results/fault_matrix_cpu.json, from which `python -m benchmarks.tables` makes the table of
docs/publication.md, and exits 1 if a cell fails.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from tests.tiny import write_ouro

from .cells import all_cells, bench, check, environment_is_clean


def main() -> int:
    record.commit()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"A": write_ouro(folder / "a"), "B": write_ouro(folder / "b", seed=1)}
        for workers in (1, 2):
            cells += run_all(models, folder, workers)
    environment_is_clean()
    failed = [cell for cell in cells if not cell["ok"]]
    path = record.write(
        "fault_matrix_cpu",
        command="python -m tests.contracts.engine.fault_matrix",
        settings={"model": "tiny Ouro, fp32", "workers": [1, 2], "buckets": "400 kB, 5 in all"},
        results={"cells": cells, "passed": len(cells) - len(failed), "failed": len(failed)},
    )
    print(f"{len(cells) - len(failed)} passed, {len(failed)} failed: {path}")
    return bool(failed)


def run_all(models: dict[str, Path], folder: Path, workers: int) -> list[dict[str, Any]]:
    """Every cell on one engine, which later cells find as earlier ones left it. A failed cell starts another engine."""
    cells, left = [], all_cells()
    while left:
        with bench(models, folder, tensor_parallel=workers) as stand:
            while left:
                step, fault = left.pop(0)
                try:
                    cell = {"ok": True, **check(stand, step, fault)}
                except Exception as error:
                    cell = {
                        "ok": False,
                        "step": step,
                        "fault": fault,
                        "error": f"{type(error).__name__}: {error}"[:500],
                    }
                cells.append({"workers": workers, **cell})
                print(cells[-1], flush=True)
                if not cell["ok"]:
                    break
    return cells


if __name__ == "__main__":
    sys.exit(main())
