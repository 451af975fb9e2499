"""The whole fault matrix on real vLLM, for both models, with one worker and with two. Part of make test-all.

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

from .cells import BUCKET_BYTES, all_cells, bench, check, environment_is_clean
from .conftest import MODELS

ENGINES = (("ouro", 1), ("ouro", 2), ("olmoe", 1))
"""Model and number of tensor-parallel workers."""


def main() -> int:
    record.commit()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for model, workers in ENGINES:
            folder = Path(name) / f"{model}-{workers}"
            models = {key: MODELS[model](folder / key, seed=seed) for seed, key in enumerate("AB")}
            cells += [{"model": model, **cell} for cell in run_all(models, folder, workers)]
    environment_is_clean()
    failed = [cell for cell in cells if not cell["ok"]]
    path = record.write(
        "fault_matrix_cpu",
        command="python -m tests.contracts.engine.fault_matrix",
        settings={"models": "tiny, fp32", "engines": ENGINES, "bucket_bytes": BUCKET_BYTES},
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
