"""One page about a run: figures over updates, where time goes, and sample responses with what each token ran.

    python -m tether.report RUN [--out FILE]

Writes RUN/report.html: a single file without scripts or anything from elsewhere, readable at any width. It may be made
while the run goes on.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.durable import replace_file
from tether.data import load_tokenizer
from tether.report_charts import bars, heat, lines, stacked
from tether.report_samples import samples_table
from tether.run_directory import RunDirectory, read_json_lines

SECONDS = "_seconds"
PUBLISH = "publish_"
"""What the phases of a publication begin with: they are parts of `publish_seconds`."""
STYLE = """
:root { --ink: #1d2530; --soft: #667080; --line: #dde2e8; --ground: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1240px; color: var(--ink); background: var(--ground);
       font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5em; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1em; margin: 28px 0 8px; border-bottom: 1px solid var(--line); }
p, figcaption { color: var(--soft); margin: 4px 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 18px; }
figure { margin: 0; min-width: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
figcaption b { color: var(--ink); font-weight: 600; }
.keys span { white-space: nowrap; margin-right: 10px; }
.keys i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 5px 8px; border-bottom: 1px solid var(--line);
         overflow-wrap: anywhere; }
th { white-space: nowrap; overflow-wrap: normal; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { font-family: ui-monospace, monospace; font-size: 13px; overflow-wrap: anywhere; white-space: pre-wrap; }
.text span { border-radius: 2px; }
.samples th:nth-child(-n+2) { width: 1%; }
.samples th:nth-child(3) { width: 68%; }
details { margin: 6px 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; }
@media (max-width: 600px) {
  body { padding: 10px; }
  .samples thead { display: none; }
  .samples tr { display: block; border-bottom: 2px solid var(--line); padding: 6px 0; }
  .samples td { display: block; border: 0; padding: 1px 0; text-align: left !important; }
  .samples td[data-name]::before { content: attr(data-name) ": "; color: var(--soft); }
}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 2 for a run that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m tether.report", description="Writes one page about a run.")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.run / "report.html"
    try:
        replace_file(out, page(RunDirectory(arguments.run)))
    except ValueError as error:
        print(f"tether: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def page(directory: RunDirectory) -> str:
    """The whole page.

    Raises:
        ValueError: no run is there, its files are damaged, or no update was made yet.
    """
    run, metrics = directory.read_run(), read_json_lines(directory.metrics_file)
    if not metrics:
        raise ValueError(f"{directory.path}: no update was made yet, so there is nothing to report")
    last = metrics[-1]
    name = html.escape(directory.path.resolve().name)
    told = [("Learning", learning(metrics)), ("Rollouts", rollouts(metrics)), ("Speed", speed(metrics))]
    sections = [f'<h2>{title}</h2><div class="charts">{"".join(filter(None, charts))}</div>' for title, charts in told]
    sections.append(f"<h2>Publications and events</h2>{events(directory)}")
    sections.append(f"<h2>Samples of update {last['update']}</h2>{newest_samples(directory, run)}")
    settings = html.escape(json.dumps(run.get("settings", {}), indent=1))
    sections.append(
        f"<h2>Settings</h2><details><summary>every setting of the run</summary><pre>{settings}</pre></details>"
    )
    model = html.escape(str(run.get("model", "unknown model")))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{STYLE}</style></head><body>"
        f"<h1>{name}</h1><p>{model}, {last['update']} updates, mean reward {last['reward_mean']:.3f}</p>"
        f"{tripped(metrics)}{''.join(sections)}</body></html>\n"
    )


def learning(metrics: list[dict[str, Any]]) -> list[str]:
    """Charts of what is learnt and whether it may be trusted."""
    passes = {key for line in metrics for key in line if key.startswith("eval_pass_at_")}
    drawn = {key: f"pass@{key.rpartition('_')[2]}" for key in sorted(passes, key=lambda key: (len(key), key))}
    return [
        lines(metrics, {"reward_mean": "rollouts", "eval_reward_mean": "held out, greedy"}, title="Reward"),
        lines(metrics, drawn, title="Held out, drawn"),
        lines(
            metrics,
            {"logprob_diff_mean": "mean", "logprob_diff_max": "largest"},
            title="Score difference, trainer to engine (nats)",
            log=True,
        ),
        lines(metrics, {"policy_kl": "from the old policy", "reference_kl": "from the reference"}, title="KL (nats)"),
        lines(
            metrics, {"clip_fraction": "clipped", "mismatch_bound_fraction": "mismatch bound"}, title="Share of tokens"
        ),
        lines(metrics, {"entropy_estimate": "from samples", "entropy": "exact"}, title="Entropy (nats)"),
        lines(metrics, {"grad_norm": "before clipping"}, title="Gradient norm"),
        lines(metrics, {"loss": "loss"}, title="Loss"),
    ]


def rollouts(metrics: list[dict[str, Any]]) -> list[str]:
    """Charts of what the policy does."""
    lengths = {
        "response_length_mean": "mean",
        "response_length_max": "longest",
        "eval_response_length_mean": "held out",
    }
    return [
        lines(metrics, lengths, title="Response length (tokens)"),
        lines(metrics, {"truncated_share": "cut off", "eval_stop_share": "stopped, held out"}, title="Endings (share)"),
        lines(metrics, {"depth_mean": "rollouts", "eval_depth_mean": "held out"}, title="Loops per token"),
        stacked(metrics, "depth_histogram", title="Loops of generated tokens (share)"),
        heat(metrics[-1].get("expert_load"), title=f"Expert load, update {metrics[-1]['update']} (layers by experts)"),
        lines(metrics, {"effective_experts_min": "effective, least"}, title="Experts in use"),
        lines(metrics, {"prompts_dropped": "prompts left out", "samples_stale": "stale samples",
                        "reward_failures": "without a reward", "skipped_steps": "skipped steps"}, title="Left out"),
    ]  # fmt: skip


def speed(metrics: list[dict[str, Any]]) -> list[str]:
    """Charts of where time goes."""
    names = {key: key.removesuffix(SECONDS) for line in metrics for key in line if key.endswith(SECONDS)}
    phases = {key: name for key, name in names.items() if not name.startswith(PUBLISH)}
    parts = {key: name.removeprefix(PUBLISH).replace("_", " ") for key, name in names.items() if key not in phases}
    return [
        bars(metrics, phases, title="Seconds of an update"),
        lines(metrics, {"publish_seconds": "all of it", **parts}, title="Publication (seconds)"),
        lines(
            metrics,
            {"rollout_tokens_per_second": "generated", "train_tokens_per_second": "trained"},
            title="Tokens a second",
        ),
        lines(metrics, {"train_flops_per_second": "all trainers"}, title="Model FLOP/s of training"),
        lines(metrics, {"train_mfu": "share"}, title="Model FLOP/s of training, of the peak (share)"),
    ]


def tripped(metrics: list[dict[str, Any]]) -> str:
    """What tripwires said, newest first."""
    told = [f"update {m['update']}: {text}" for m in reversed(metrics) for text in m.get("tripped", [])]
    if not told:
        return "<p>No tripwire was touched.</p>"
    shown = "".join(f"<p>{html.escape(text)}</p>" for text in told[:5])
    return f"<details open><summary><b>{len(told)} tripwire messages</b>, the newest:</summary>{shown}</details>"


def events(directory: RunDirectory) -> str:
    """The table of what happened to the run."""
    rows = [
        f"<tr><td>{html.escape(str(event.pop('time', '')))}</td><td>{html.escape(str(event.pop('event', '')))}</td>"
        f"<td>{html.escape(', '.join(f'{k} {v}' for k, v in event.items()))}</td></tr>"
        for event in read_json_lines(directory.events_file)[-12:]
    ]
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>' if rows else "<p>none</p>"


def newest_samples(directory: RunDirectory, run: dict[str, Any]) -> str:
    """The table of some samples of the newest update whose samples were kept."""
    files = sorted(directory.rollouts.glob("update_*.jsonl"))
    if not files:
        return "<p>No samples were kept (keep_rollouts=false).</p>"
    try:
        tokenizer = load_tokenizer(Path(run["model"]))
    except (KeyError, ValueError):
        tokenizer = None  # the model has moved: token ids are shown instead
    return samples_table(read_json_lines(files[-1]), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
