"""Writes the tables of documents from the JSONs of measurements, between the markers that name them.

    python -m benchmarks.tables [--check]

A document holds `<!-- table NAME -->` ... `<!-- end -->`; what stands between is replaced. NAME is a JSON's, or with a
dot and a word behind it one of several tables of that JSON. With --check nothing is
written, and the exit code is 1 if a table is not what its JSON says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_tables, performance_tables
from benchmarks.record import RESULTS

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "docs/publication.md",
    "docs/disaggregated.md",
    "docs/parallelism.md",
    "docs/performance.md",
    "docs/gpu.md",
    "docs/memory.md",
)
Record = dict[str, Any]


def fault_matrix(record: Record) -> str:
    """One row a step, one column a fault: how the call ended, and what served. Engines that differ share a cell."""
    cells = record["results"]["cells"]
    steps, faults = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("step", "fault"))
    rows = [[step, *(_ways(cells, step, fault) for fault in faults)] for step in steps]
    summary = f"{record['results']['passed']} of {len(cells)} cells passed"
    return "\n".join([_markdown(["step", *faults], rows), "", f"{summary}; {_source(record)}."])


def _ways(cells: list[Record], step: str, fault: str) -> str:
    found = [cell for cell in cells if (cell["step"], cell["fault"]) == (step, fault)]
    return " / ".join(dict.fromkeys(_way(cell) for cell in found)) or ""


def _way(cell: Record) -> str:
    if not cell["ok"]:
        return "**failed**"
    error = {"PublicationRefused": "refused", "PublicationFailed": "failed", "EngineBlocked": "blocked"}
    how = error.get(cell["error"], cell["error"].removeprefix("Engine").lower())
    return f"{how}{', restart' if cell['restarted'] else ''}: {cell['serves']}"


def publication(record: Record) -> str:
    """Phases of a publication beside the copy of the same bytes."""
    results = record["results"]
    rows = [
        [name, f"{times['median']:.3f}", f"{times['min']:.3f}", f"{times['max']:.3f}"]
        for name, times in results["seconds"].items()
    ]
    copies, overwrites = (results[f"ratio_to_{name}"]["median"] for name in ("copy", "overwrite"))
    size = f"{results['num_parameters'] / 1e6:.0f} million parameters, {results['num_bytes'] / 1e6:.0f} MB"
    table = _markdown(["phase", "median s", "min", "max"], rows)
    ratios = f"a publication takes {copies:.1f} copies into new memory, {overwrites:.1f} overwrites"
    return f"{table}\n\n{size}; {ratios}; {_publication_beside(results)}{_source(record)}."


def _publication_beside(results: Record) -> str:
    """What a publication is for, its limit and its peers, where they were measured."""
    if "split" not in results:
        return ""
    parts = ", ".join(f"{name} {times['median']:.3f}" for name, times in results["split"].items())
    limits = ", ".join(f"{name.removesuffix('_seconds')} {value:.4f}" for name, value in results["limit"].items())
    peers = "".join(f"{name} {times['median']:.3f} s; " for name, times in results["peers"].items())
    return f"of it {parts} s; limit: {limits} s; {peers}"


def sequences(record: Record) -> str:
    rows = [[name, str(count)] for name, count in record["results"].items()]
    return f"{_markdown(['what', 'count'], rows)}\n\n{_source(record)}."


def layout_matrix(record: Record) -> str:
    """One row a layout against one process; below, how many crossings and resumes were bitwise."""
    cells = record["results"]["cells"]
    figures = ("scores", "losses", "gradients", "grad_norm")
    rows = [
        [c["model"], c["layout"], *(f"{c[name]:.1e}" if c["ok"] else "**failed**" for name in figures)]
        for c in cells
        if c["check"] == "layout"
    ]
    counts = {
        check: f"{sum(c['ok'] for c in of)} of {len(of)}"
        for check in ("crossing", "resume")
        if (of := [c for c in cells if c["check"] == check])
    }
    text = (
        f"Largest difference from one process, of gradients relative to the largest of their tensor. Checkpoints that "
        f"crossed from one layout to another bitwise: {counts['crossing']}. Runs of 3 + 3 updates bitwise equal to 6 "
        "(fp32 and bf16, optimizer distributed and replicated, save synchronous and asynchronous, one process and "
        f"two): {counts['resume']}."
    )
    return f"{_markdown(['model', 'layout', *figures], rows)}\n\n{text} {_source(record)}."


def checkpoint(record: Record) -> str:
    """Seconds of each way to save and load beside torch's own."""
    results = record["results"]
    rows = [
        [name, f"{times['median']:.2f}", f"{times['min']:.2f}", f"{times['max']:.2f}"]
        for name, times in results["seconds"].items()
    ]
    size = f"{results['num_parameters'] / 1e6:.0f} million parameters, {results['num_bytes'] / 1e6:.0f} MB with masters"
    ratio = results["ratio_to_torch_save"]["median"]
    table = _markdown(["what", "median s", "min", "max"], rows)
    return f"{table}\n\n{size} and moments; a save takes {ratio:.1f} times torch.save; {_source(record)}."


def lost_workers(record: Record) -> str:
    """One row a phase, one column an engine and fault: how the call ended, and what served after a publication."""
    cells = record["results"]["cells"]
    phases = list(dict.fromkeys(re.sub(r"\d$", "", cell["phase"]) for cell in cells))
    columns = list(dict.fromkeys((cell["model"], cell["engine"], cell["fault"]) for cell in cells))
    rows = [[phase, *(_lost_way(cells, phase, column) for column in columns)] for phase in phases]
    summary = f"{record['results']['passed']} of {len(cells)} cells passed; an empty cell was not run"
    header = ["phase, worker", *(f"{model} {engine} {fault}" for model, engine, fault in columns)]
    return "\n".join([_markdown(header, rows), "", f"{summary}; {_source(record)}."])


def _lost_way(cells: list[Record], phase: str, column: tuple[str, str, str]) -> str:
    for cell in cells:
        if (re.sub(r"\d$", "", cell["phase"]), cell["model"], cell["engine"], cell["fault"]) == (phase, *column):
            if not cell["ok"]:
                return "**failed**"
            how = re.sub("^(Engine|Publication)", "", cell["ended"]).lower()
            return f"{how}: {cell['serves']}" if cell["serves"] in ("old", "new") and how != "recovered" else how
    return ""


def with_source(make: Callable[[Record], tuple[list[str], list[list[str]]]]) -> Callable[[Record], str]:
    """The table of a header and rows, and below it where the figures come from."""

    def table(record: Record) -> str:
        head, rows = make(record)
        return f"{_markdown(head, rows) if rows else 'Not in this record.'}\n\n{_source(record)}."

    return table


TABLES: dict[str, Callable[[Record], str]] = {
    "checkpoint_cpu": checkpoint,
    "checkpoint_cuda": checkpoint,
    "fault_matrix_cpu": fault_matrix,
    "layout_matrix_cpu": layout_matrix,
    "pd_faults_cpu": lost_workers,
    "publication_cpu": publication,
    "publication_cuda_host": publication,
    "publication_cuda_shadow": publication,
    "publication_cuda_ipc": publication,
    "sequences_cpu": sequences,
    "disaggregated_cuda": with_source(performance_tables.disaggregated),
    "rollout_cuda": with_source(performance_tables.rollout),
    "rollout_before_cuda": with_source(performance_tables.rollout),
    "rollout_before_cuda.steps": with_source(performance_tables.rollout_steps),
    "rollout_olmoe_cuda": with_source(performance_tables.rollout_experts),
    "rollout_olmoe_before_cuda": with_source(performance_tables.rollout_experts),
    "rollout_olmoe_before_cuda.steps": with_source(performance_tables.rollout_steps),
    "train_replay_cuda": with_source(performance_tables.train_replay),
    "logprob_cuda": with_source(performance_tables.logprob),
    "olmoe_train_cuda": with_source(performance_tables.olmoe_train),
    "gpu_tests": with_source(gpu_tables.tests),
    "gpu_tests.printed": with_source(gpu_tables.printed),
    "gpu_tests_experts": with_source(gpu_tables.tests),
    "gpu_tests_two": with_source(gpu_tables.on_two_devices),
    "fault_matrix_cuda": fault_matrix,
    **{
        f"full_size_{model}.{part}": with_source(make)
        for model in ("ouro_1_4b", "olmoe_1b_7b")
        for part, make in {
            "scores": gpu_tables.scores,
            "steps": gpu_tables.steps,
            "verified": gpu_tables.verified,
            "memory": gpu_tables.device_memory,
        }.items()
    },
    "full_size_ouro_1_4b_one_slot": with_source(gpu_tables.one_slot),
    "difference_ouro_1_4b": with_source(gpu_tables.causes),
    "difference_before_ouro_1_4b": with_source(gpu_tables.causes),
    "difference_before_ouro_1_4b.operations": with_source(gpu_tables.operations),
    "difference_ouro_1_4b.operations": with_source(gpu_tables.operations),
    "memory_ouro_1_4b": with_source(gpu_tables.trainer_memory),
    "memory_ouro_1_4b.engine": with_source(gpu_tables.engine_memory),
    "full_size_ouro_1_4b.differences": with_source(gpu_tables.differences),
    "full_size_ouro_1_4b.phases": with_source(performance_tables.update_phases),
    "full_size_ouro_1_4b_updates.phases": with_source(performance_tables.update_phases),
    "full_size_olmoe_1b_7b.phases": with_source(performance_tables.update_phases),
}


def render(text: str) -> str:
    """The document with every table whose JSON exists made anew.

    Raises:
        ValueError: a marker names no table.
    """

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"got a marker for table {name!r}, expected one of {sorted(TABLES)}")
        path = RESULTS / f"{name.partition('.')[0]}.json"
        body = TABLES[name](json.loads(path.read_text())) if path.exists() else "Not measured yet."
        return f"<!-- table {name} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w.]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _source(record: Record) -> str:
    complete = "" if record.get("complete", True) else "**incomplete**, ended before all was measured: "
    return f"{complete}`{record['command']}` at {record['commit'][:12]}, {record['date'][:10]}, {record['device']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    check, stale = parser.parse_args(argv).check, []
    for document in DOCUMENTS:
        path = ROOT / document
        text = path.read_text()
        if (made := render(text)) != text:
            stale.append(document)
            if not check:
                path.write_text(made)
    print(f"{'out of date' if check else 'written'}: {stale or 'nothing'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
