"""Tables of docs/performance.md: each figure beside a peer of the same run and the limit of the machine."""

from __future__ import annotations

import re
import statistics
from typing import Any

Record = dict[str, Any]
Rows = tuple[list[str], list[list[str]]]
"""Header and rows of a table."""


def rollout(record: Record) -> Rows:
    """Tokens per second of each engine and depth, beside the bytes that must be moved."""
    rows = [
        [row["engine"], row["policy"], _requests(row), f"{row['depth_mean']:.2f}", *_speed(row)]
        for row in record["results"]["rows"]
    ]
    return ["engine", "depth", "requests", "mean loops", *SPEED], rows


def rollout_experts(record: Record) -> Rows:
    """The same of a model with experts: how many of them a layer must read."""
    rows = [
        [row["engine"], _requests(row), f"{row['experts_read']:.1f}", *_speed(row)] for row in record["results"]["rows"]
    ]
    return ["engine", "requests", "experts read", *SPEED], rows


SPEED = ["tokens/s", "from .. to", "limit", "of it"]


def _requests(row: Record) -> str:
    return f"{row['requests']} x {row['response']}"


def _speed(row: Record) -> list[str]:
    speeds, limit = row["tokens_per_second"], row["limit_tokens_per_second"]
    median = statistics.median(speeds)
    return [
        f"{median:,.0f}",
        f"{min(speeds):,.0f} .. {max(speeds):,.0f}",
        f"{limit:,.0f}",
        f"{100 * median / limit:.0f} %",
    ]


def rollout_steps(record: Record) -> Rows:
    """One decode step: by the clock, in kernels, the largest of these, and the largest of the host where recorded."""
    rows, steps = [], record["results"]["profiled_steps"]
    has_host = any("host" in step for step in steps)
    for step in steps:
        count = step["steps"]
        top = "; ".join(f"{_short(k['name'])} {k['ms'] / count:.1f}" for k in step["top"][:4])
        busy = step["kernels_ms"] / count
        row = [step["policy"], str(step["requests"]), f"{step['ms_per_step']:.1f}", f"{busy:.1f}", top]
        if has_host:
            row.append("; ".join(f"`{f['name']}` {f['ms'] / count:.1f}" for f in step.get("host", [])[:4]))
        rows.append(row)
    head = ["depth", "requests", "ms a step", "kernels ms", "largest kernels, ms a step"]
    return [*head, *(["largest of the host, ms a step"] if has_host else [])], rows


def train_replay(record: Record) -> Rows:
    """Forward and backward of the trainer at every kind of depth, beside plain PyTorch."""
    limit = record["results"]["limit"]["flops_per_second"]
    rows = []
    for row in [*record["results"]["updates"], *record["results"]["peers"]]:
        memory = row["memory_bytes"]
        rows.append(
            [
                row.get("what", "trainer"),
                row.get("depth", "full"),
                f"{row['sequences']} x {row['tokens_each']}",
                "yes" if row["recompute"] else "no",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['model_flops_per_second'] / 1e12:.0f}",
                f"{100 * row['model_flops_per_second'] / limit:.0f} %",
                f"{row['optimizer_step_seconds']['median'] * 1e3:.0f}" if "optimizer_step_seconds" in row else "",
                f"{memory['peak'] / 1e9:.1f}" if memory else "",
            ]
        )
    header = ["what", "depth", "sequences", "recompute", "tokens/s", "TFLOP/s", "of the product's", "optimizer ms"]
    return [*header, "peak GB"], rows


def logprob(record: Record) -> Rows:
    """Forward and backward of selected log-probs, beside peers and the matrix products alone."""
    results = record["results"]
    products = results["its three matrix products"]["seconds"]["median"]
    rows = [
        [name, "did not run: " + row["error"], "", "", ""]
        if "error" in row
        else [
            name,
            f"{row['seconds']['median'] * 1e3:.1f}",
            f"{row['seconds']['min'] * 1e3:.1f} .. {row['seconds']['max'] * 1e3:.1f}",
            f"{row['seconds']['median'] / products:.2f}",
            f"{row['memory_bytes']['extra'] / 1e9:.2f}" if row["memory_bytes"] else "",
        ]
        for name, row in results.items()
    ]
    return ["what", "ms", "from .. to", "times its products", "extra GB"], rows


def olmoe_train(record: Record) -> Rows:
    limit = record["results"]["limit"]["flops_per_second"]
    rows = [
        [
            name,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['model_flops_per_second'] / 1e12:.0f}",
            f"{100 * row['model_flops_per_second'] / limit:.0f} %",
            f"{row['memory_bytes']['peak'] / 1e9:.1f}" if row["memory_bytes"] else "",
        ]
        for name, row in record["results"].items()
        if name != "limit"
    ]
    return ["what", "tokens/s", "TFLOP/s", "of a large product's", "peak GB"], rows


def disaggregated(record: Record) -> Rows:
    """The local engine and the ones in several processes, on the same requests."""
    rows = []
    for name, row in record["results"].items():
        if name == "remarks":
            continue
        differs = f"{row['logprob_diff_mean']:.1e}, {row['logprob_diff_max']:.1e}" if "logprob_diff_max" in row else ""
        rows.append(
            [
                name,
                row["transports"] or "",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['seconds_to_one_token_of_each']:.2f}",
                f"{row['kv_bytes'] / 1e9:.2f}",
                differs,
            ]
        )
    header = ["engine", "transports", "tokens/s", "one token of each, s", "keys and values GB"]
    return [*header, "log-probs from local: mean, max"], rows


def update_phases(record: Record) -> Rows:
    """Seconds of each update's phases, as the driver reports them; those of a publication where the record has them."""
    lines = record["results"]["metrics"]
    parts = dict.fromkeys(name for line in lines for name in line if re.fullmatch("publish_.+_seconds", name))
    phases = ["rollout", "train", "publish", *(name.removesuffix("_seconds") for name in parts), "save"]
    rows = []
    for line in lines:
        times = [f"{line.get(f'{p}_seconds', 0):.{3 if p.startswith('publish') else 2}f}" for p in phases]
        rows.append([str(line["update"]), line.get("execution") or "", *times])
    return ["update", "depth", *(f"{phase.replace('_', ' ')} s" for phase in phases)], rows


def _short(name: str) -> str:
    """A kernel's name without its template arguments."""
    name = name.removeprefix("void ").replace("at::native::", "")
    for opening in "<(":
        name = name.split(opening, 1)[0]
    return f"`{name.strip()[:60]}`"
