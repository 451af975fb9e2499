"""Tables of docs/gpu.md and docs/memory.md."""

from __future__ import annotations

import re
from typing import Any

Record = dict[str, Any]
Rows = tuple[list[str], list[list[str]]]
"""Header and rows of a table."""
PARTS = ("weights", "gradients", "masters and moments", "kept activations", "widest moment")


def tests(record: Record) -> Rows:
    """One row a file, with how its tests ended; below each the tests that failed or were skipped, and why."""
    files: dict[str, dict[str, Record]] = {}
    for name, test in record["results"].get("tests", {}).items():
        file, _, own = name.partition("::")
        files.setdefault(file, {})[own] = test
    rows = []
    for file, of in files.items():
        outcomes = [test["outcome"] for test in of.values()]
        counts = [f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "skipped") if each in outcomes]
        rows.append([f"`{file}`", ", ".join(counts), f"{sum(test['seconds'] for test in of.values()):.0f}"])
        for own, test in of.items():
            if test["outcome"] != "passed":
                why = test.get("why") or (test.get("error") or " ").splitlines()[-1]
                rows.append([own, f"{test['outcome'].replace('failed', '**failed**')}: {_cell(why)[:160]}", ""])
    return ["tests", "outcome", "seconds"], rows


KERNELS = ("gpu/test_kernels_cuda.py", "gpu/test_training_cuda.py::test_varlen")
"""Tests that print a line for each operand: too long for a document."""


def printed(record: Record) -> Rows:
    """What the tests measured, in their own words; of the kernels the JSON says it."""
    return ["test", "printed"], [
        [name.partition("::")[2], "<br>".join(_cell(line) for line in test["printed"])]
        for name, test in record["results"].get("tests", {}).items()
        if "printed" in test and not name.startswith(KERNELS)
    ]


def on_two_devices(record: Record) -> Rows:
    """Of a run with two devices, the tests that need both: how they ended and what they measured."""
    return ["test", "outcome", "printed"], [
        [name.partition("::")[2], test["outcome"], "<br>".join(_cell(line) for line in test.get("printed", []))]
        for name, test in record["results"]["tests"].items()
        if name.endswith("-2]") and "disaggregated" in name
    ]


def scores(record: Record) -> Rows:
    """One row an update and depth: the difference that training met, beside the trainer's own error."""
    rows = []
    for row in _part(record, "yardstick"):
        own, met = row["own"], row["trainer_to_engine"]
        rows.append(
            [
                str(row["update"]),
                row["execution"],
                "all" if row["depth"] is None else str(row["depth"]),
                f"{row['count']:,}",
                *(f"{row[key]['mean']:.4f}" for key in ("trainer_to_engine", "own", "engine_to_fp32")),
                f"{met['mean'] / own['mean']:.2f}",
                f"{met['max']:.3f}",
                f"{own['max']:.3f}",
                f"{met['max'] / own['max']:.2f}",
                {True: "yes", False: "**no**", None: "too few"}[row["within"]],
            ]
        )
    head = ["update", "depth asked", "loops", "tokens", "trainer to engine, mean", "trainer to fp32, mean"]
    head += ["engine to fp32, mean", "ratio (bound 2)", "trainer to engine, max", "trainer to fp32, max"]
    return [*head, "ratio (bound 3)", "within"], rows


def differences(record: Record) -> Rows:
    """What each update met: the difference of trainer and engine, in all and by the loops that a token ran."""
    rows = []
    for line in record["results"]["metrics"]:
        depths = [name.rpartition("_")[2] for name in line if name.startswith("logprob_diff_mean_depth_")]
        by_depth = ", ".join(f"{d}: {line[f'logprob_diff_mean_depth_{d}']:.4f}" for d in depths)
        mean, most = (f"{line[f'logprob_diff_{name}']:.4f}" for name in ("mean", "max"))
        rows.append([str(line["update"]), line["execution"], f"{line['num_tokens']:,}", mean, most, by_depth])
    return ["update", "depth asked", "tokens", "mean", "max", "mean by loops"], rows


def one_slot(record: Record) -> Rows:
    """What two updates in one go and one with a resumed one have in common."""
    found = _part(record, "one_slot")
    if "error" in found:
        return ["what", "result"], [["failed", _cell(found["error"])]]
    return ["what", "result"], [[name.replace("_", " "), str(value)] for name, value in found.items()]


def steps(record: Record) -> Rows:
    """Seconds of each step, and what failed."""
    results = record["results"]
    failed = results.get("failed", [])
    seconds = results.get("seconds", {})
    return ["step", "seconds", ""], [
        [name, f"{value:.0f}", "**failed**" if name in failed else ""] for name, value in seconds.items()
    ]


def verified(record: Record) -> Rows:
    """The lines of `tether convert verify`."""
    found = _part(record, "verify")
    if isinstance(found, dict):
        return ["check", "", ""], [["failed", "", _cell(found["error"])]] if found else []
    return ["check", "", ""], [re.split(r"\s{2,}", line, maxsplit=2) for line in found]


def device_memory(record: Record) -> Rows:
    """What a run really took of its first device."""
    return ["bytes", "GB"], [
        [name.removesuffix("_bytes").replace("_", " "), f"{size / 1e9:.1f}"]
        for name, size in _part(record, "memory").items()
    ]


def causes(record: Record) -> Rows:
    """One row a variant of the trainer: how far it is from the trainer as it is, from the engine, and from fp32."""
    rows: list[list[str]] = []
    policies: list[str] = []
    for row in record["results"].get("rows", []):
        keys = ("to_trainer", "to_engine", "to_fp32")
        policies = [policy for policy in row["to_engine"] if policy != "all"]
        rows.append(
            [
                row["name"],
                f"{layer['relative']:.1e}" if (layer := row.get("after_one_layer")) else "",
                *(f"{row[key]['all']['mean']:.4f}" for key in keys),
                f"{row['to_engine']['all']['max']:.3f}",
                *(f"{row['to_engine'][policy]['mean']:.4f}" for policy in policies),
            ]
        )
    head = [
        "what is changed",
        "state after one layer",
        "to the trainer as it is, mean",
        "to the engine, mean",
        "to fp32, mean",
    ]
    return [*head, "to the engine, max", *(f"{policy}, to the engine" for policy in policies)], rows


def operations(record: Record) -> Rows:
    """One row an operation: how often the engine's rounds otherwise than the trainer's on the same inputs."""
    return ["operation", "values that differ", "relative difference"], [
        [row["name"], *([_cell(row["error"]), ""] if "error" in row else [_percent(row), f"{row['relative']:.1e}"])]
        for row in record["results"].get("operations", [])
    ]


def _percent(row: Record) -> str:
    return f"{100 * row['differing']:.1f} %"


def trainer_memory(record: Record) -> Rows:
    """One row a setting: the estimate's parts and their sum, beside the measured peak."""
    rows = []
    for row in record["results"]["trainer"]:
        estimate, peak = row["estimate"], row["peak_bytes"]
        rows.append(
            [
                "yes" if row["recompute"] else "no",
                f"{row['tokens_per_microbatch']:,}",
                *(f"{estimate[part] / 1e9:.2f}" for part in PARTS),
                f"{sum(estimate.values()) / 1e9:.2f}",
                f"{peak / 1e9:.2f}" if peak else "",
                f"{row['ratio']:.2f}" if row["ratio"] else "",
            ]
        )
    return ["recompute", "tokens", *PARTS, "estimate, GB", "measured, GB", "ratio"], rows


def engine_memory(record: Record) -> Rows:
    """The estimate's parts beside what the device had less of."""
    if "engine" not in record["results"]:
        return [], []
    row = record["results"]["engine"]
    estimate = row["estimate"]
    head = [*estimate, "estimate, GB", "measured, GB", "ratio"]
    sizes = [*estimate.values(), sum(estimate.values()), row["busy_bytes"]]
    return head, [[*(f"{size / 1e9:.2f}" for size in sizes), f"{row['ratio']:.2f}" if row["ratio"] else ""]]


def _part(record: Record, name: str) -> Any:
    """A part of the results; empty where a record has none, as those before it was measured."""
    found = record["results"].get(name, {})
    return {} if name == "yardstick" and "error" in found else found


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[-1000:]
