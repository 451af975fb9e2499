"""The whole fault matrix on real vLLM, for both models, with one worker and with two. Part of make test-all.

    python -m tests.contracts.engine.fault_matrix [--processes 6] [--commit ID]

Writes benchmarks/results/fault_matrix_{cpu,cuda}.json, from which `python -m benchmarks.tables` makes the table of
docs/publication.md, and exits 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from tether.run_directory import read_json_lines

from .cells import BUCKET_BYTES, all_cells, bench, check, environment_is_clean
from .conftest import MODELS

ENGINES = (("ouro", 1), ("ouro", 2), ("olmoe", 1))
"""Model and number of tensor-parallel workers; on CUDA as many as there are devices."""
Job = tuple[str, int, list[tuple[str, str]]]
CELLS = "cells.jsonl"
SAVE_SECONDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1, help="engines that share the cells among them")
    parser.add_argument("--commit", help="of a working tree without git")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.device_count()
    engines = [(model, workers) for model, workers in ENGINES if not cuda or workers <= cuda]
    parts = arguments.processes
    recording = record.Recording(
        f"fault_matrix_{'cuda' if cuda else 'cpu'}",
        command="python -m tests.contracts.engine.fault_matrix" + (f" --processes {parts}" if parts > 1 else ""),
        settings={"models": "tiny, fp32", "engines": engines, "bucket_bytes": BUCKET_BYTES},
        commit_id=arguments.commit,
    )
    jobs: list[Job] = [(*engine, all_cells()[part::parts]) for engine in engines for part in range(parts)]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(i) for i in range(len(jobs))]
        with ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn")) as pool:
            left = {pool.submit(run_job, *each) for each in zip(jobs, folders, strict=True)}
            while left:
                ended, left = wait(left, timeout=SAVE_SECONDS)
                recording.save(**so_far(folders))
                for future in ended:
                    future.result()
        found = so_far(folders)
    recording.finish(**found)
    print(f"{found['passed']} passed, {found['failed']} failed")
    return bool(found["failed"])


def so_far(folders: Sequence[Path]) -> dict[str, Any]:
    """The cells of all jobs, in the order of the jobs, and how many passed and failed."""
    cells = [cell for folder in folders for cell in read_json_lines(folder / CELLS)]
    failed = sum(not cell["ok"] for cell in cells)
    return {"cells": cells, "passed": len(cells) - failed, "failed": failed}


def run_job(job: Job, folder: Path) -> None:
    """Some cells on one engine of a model; each is a line of folder/CELLS as soon as it has ended."""
    model, workers, cells = job
    models = {key: MODELS[model](folder / key, seed=seed) for seed, key in enumerate("AB")}
    for cell in run_all(models, folder, workers, cells):
        print(cell, flush=True)
        with (folder / CELLS).open("a") as file:
            file.write(json.dumps({"model": model, **cell}) + "\n")
    environment_is_clean()


def run_all(
    models: dict[str, Path], folder: Path, workers: int, left: list[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Cells on one engine, which later ones find as earlier ones left it. A failed cell starts another engine."""
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
                yield {"workers": workers, **cell}
                if not cell["ok"]:
                    break


if __name__ == "__main__":
    sys.exit(main())
