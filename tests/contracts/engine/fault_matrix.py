"""The whole fault matrix on real vLLM, for both models, with one worker and with two. Part of make test-all.

    python -m tests.contracts.engine.fault_matrix [--processes 6] [--commit ID]

Writes benchmarks/results/fault_matrix_{cpu,cuda}.json, from which `python -m benchmarks.tables` makes the table of
docs/publication.md, and exits 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

from .cells import BUCKET_BYTES, all_cells, bench, check, environment_is_clean
from .conftest import MODELS

ENGINES = (("ouro", 1), ("ouro", 2), ("olmoe", 1))
"""Model and number of tensor-parallel workers; on CUDA as many as there are devices."""
Job = tuple[str, int, list[tuple[str, str]]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1, help="engines that share the cells among them")
    parser.add_argument("--commit", help="of a working tree without git, as on a lent machine")
    arguments = parser.parse_args(argv)
    if not arguments.commit:
        record.commit()
    cuda = torch.cuda.device_count()
    engines = [(model, workers) for model, workers in ENGINES if not cuda or workers <= cuda]
    parts = arguments.processes
    jobs: list[Job] = [(*engine, all_cells()[part::parts]) for engine in engines for part in range(parts)]
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(i) for i in range(len(jobs))]
        if parts == 1:
            results = map(run_job, jobs, folders)
        else:
            pool = ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn"))
            results = pool.map(run_job, jobs, folders)
        for result in results:
            cells += result
    failed = [cell for cell in cells if not cell["ok"]]
    path = record.write(
        f"fault_matrix_{'cuda' if cuda else 'cpu'}",
        command="python -m tests.contracts.engine.fault_matrix" + (f" --processes {parts}" if parts > 1 else ""),
        settings={"models": "tiny, fp32", "engines": engines, "bucket_bytes": BUCKET_BYTES},
        results={"cells": cells, "passed": len(cells) - len(failed), "failed": len(failed)},
        commit_id=arguments.commit,
    )
    print(f"{len(cells) - len(failed)} passed, {len(failed)} failed: {path}")
    return bool(failed)


def run_job(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Some cells on one engine of a model."""
    model, workers, cells = job
    models = {key: MODELS[model](folder / key, seed=seed) for seed, key in enumerate("AB")}
    done = [{"model": model, **cell} for cell in run_all(models, folder, workers, cells)]
    environment_is_clean()
    return done


def run_all(models: dict[str, Path], folder: Path, workers: int, left: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Cells on one engine, which later ones find as earlier ones left it. A failed cell starts another engine."""
    cells = []
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
