"""What a person watching sees: a progress bar on a terminal, one plain line per update elsewhere."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.ranks import rank
from tether.settings import RunArguments, to_argv

PHASES = ("rollout", "train", "publish", "save")


class Progress:
    """Shows updates as they finish. Messages go through it, so that they do not break the bar."""

    def __init__(self, *, total: int, done: int) -> None:
        self._total, self._bar = total, None
        if rank() == 0 and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="update", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, metrics: Mapping[str, Any]) -> None:
        """One update has finished."""
        figures = summary(metrics)
        if self._bar is None:
            say(f"update {metrics['update']}/{self._total}  " + "  ".join(f"{k} {v}" for k, v in figures.items()))
        else:
            self._bar.set_postfix_str(", ".join(f"{k} {v}" for k, v in figures.items()), refresh=False)
            self._bar.update()


def summary(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The few figures worth watching, as text."""
    seconds = "/".join(f"{metrics[f'{phase}_seconds']:.1f}" for phase in PHASES)
    return {
        "reward": f"{metrics['reward_mean']:.3f}",
        "loss": _figure(metrics["loss"], "+.2e"),
        "score diff": "{} (max {})".format(*(_figure(metrics[f"logprob_diff_{x}"], ".1e") for x in ("mean", "max"))),
        "/".join(PHASES): f"{seconds} s",
    }


def _figure(value: float | None, form: str) -> str:
    """A number as text; "none" where no step was made."""
    return "none" if value is None else format(value, form)


def say(text: str, *, every_rank: bool = False) -> None:
    """A message to the person, from rank 0 alone unless every rank has its own to tell."""
    if rank() == 0 or every_rank:
        print(text, file=sys.stderr, flush=True)


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log, for an error message; empty if there is none."""
    if not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return f"last lines of {path}:\n" + "\n".join(f"  {line}" for line in lines)


def closing_lines(arguments: RunArguments) -> str:
    """Where the run is, how to go on with it and how to export it; only where it is, of a run without checkpoints."""
    out = shlex.quote(str(arguments.out))
    if not arguments.settings.save_every:
        return f"run:    {out} (metrics.jsonl, rollouts/, hf/, logs/; no checkpoints: save_every=0)"
    return "\n".join(
        [
            f"run:    {out} (metrics.jsonl, rollouts/, checkpoints/, hf/, logs/)",
            resume_line(arguments, 2 * arguments.updates),
            f"export: {_python()} -m tether.convert export {out} HF_DIR",
        ]
    )


def stopped_lines(arguments: RunArguments, update: int, reason: str | None) -> str:
    """That a run stopped as it was asked to, where it stands, and how to go on."""
    why = reason or "another process was asked to stop"
    if not arguments.settings.save_every:
        return f"stopped after update {update} of {arguments.updates} ({why}); nothing was saved (save_every=0)"
    return "\n".join(
        [
            f"stopped after update {update} of {arguments.updates} ({why}); its checkpoint is complete",
            resume_line(arguments, arguments.updates),
        ]
    )


def resume_line(arguments: RunArguments, updates: int) -> str:
    """The command that goes on. A recipe that started this process says in TETHER_RECIPE how it is called again."""
    module = "tether.launch" if arguments.settings.train_devices > 1 else "tether.train"
    recipe = os.environ.get("TETHER_RECIPE") or f"{_python()} -m {module} {shlex.join(to_argv(arguments))}"
    return f"resume: {recipe} --updates {updates} --resume"


def _python() -> str:
    return min(os.path.relpath(sys.executable), sys.executable, key=len)
