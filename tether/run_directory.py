"""The files of one run: who may use OUT, what is written there, and how it is cut back to a checkpoint on resume.

run.json                      resolved settings, paths and run contract
metrics.jsonl                 one line per update; equal between a continuous and a resumed run, times aside
events.jsonl                  starts, resumes and ends, with time and incarnation
rollouts/update_NNNNNNN.jsonl every sample of an update
checkpoints/iter_NNNNNNN/     written by the trainer
logs/                         one file per process
tensorboard/                  event files, with tensorboard=true
report.html                   written by `python -m tether.report`
hf/                           the export
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adapters.durable import replace_file
from adapters.megatron import checkpoint_files

logger = logging.getLogger(__name__)

ROLLOUT_NAME = re.compile(r"update_(\d+)\.jsonl$")


class RunDirectory:
    """OUT. Only rank 0 writes through it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.json"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.rollouts, self.checkpoints = path / "rollouts", path / "checkpoints"
        self.logs, self.hf, self.tensorboard = path / "logs", path / "hf", path / "tensorboard"

    def trainer_log(self, rank: int) -> Path:
        """The log of a trainer process."""
        return self.logs / f"trainer_rank{rank}.log"

    def check_free(self) -> None:
        """Raises ValueError if OUT is a file or holds anything, another run above all.

        A run that ended before its first checkpoint has done nothing; it may be started again.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: a file is in the way; choose another --out")
        if self.run_file.exists() and not checkpoint_files.checkpoints(self.checkpoints) and not self.has_metrics():
            return
        if self.run_file.exists():
            raise ValueError(f"{self.path}: holds another run; add --resume to go on with it, or choose another --out")
        if self.path.is_dir() and (found := self._foreign()):
            raise ValueError(f"{self.path}: not empty ({', '.join(found[:5])}); choose another --out")

    def _foreign(self) -> list[str]:
        """What OUT holds that is not of this start: its other processes open their logs whenever they come up."""
        names = {path.name for path in self.path.iterdir()} - {".lock"}
        if self.logs.is_dir() and all(path.match("trainer_rank*.log") for path in self.logs.iterdir()):
            names -= {self.logs.name}
        return sorted(names)

    def read_run(self) -> dict[str, Any]:
        """run.json of the run to resume.

        Raises:
            ValueError: there is no run here, or its run.json is damaged.
        """
        try:
            run = json.loads(self.run_file.read_text())
        except FileNotFoundError:
            raise ValueError(f"{self.path}: no run to resume (run.json is missing); start without --resume") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.run_file}: damaged ({error}); the run cannot be resumed") from error
        if not isinstance(run, dict) or "contract" not in run:
            raise ValueError(f"{self.run_file}: holds no run contract; the run cannot be resumed")
        return run

    def checkpoint_to_resume(self, update: int | None = None) -> Path:
        """The newest checkpoint, or that of an update.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        if update is not None:
            path = checkpoint_files.final_name(self.checkpoints, update)
            checkpoint_files.require_whole(path)
            return path
        newest = checkpoint_files.latest(self.checkpoints)
        if newest is None:
            how = "start anew in another --out" if self.has_metrics() else "start it again without --resume"
            raise ValueError(
                f"{self.path}: no checkpoint to resume from. The run ended before its first one was complete, or wrote "
                f"none (save_every=0); {how}"
            )
        return newest

    def has_metrics(self) -> bool:
        """Whether an update was ever finished here."""
        return self.metrics_file.exists() and self.metrics_file.stat().st_size > 0

    def lock(self) -> None:
        """Keeps OUT for this process until it ends.

        Raises:
            ValueError: another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("w")  # the lock ends with the descriptor, however the process does
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path}: another process is running there; wait for it or stop it") from None
        except OSError as error:
            logger.warning("%s: this file system has no locks (%s); do not start two runs there", self.path, error)

    def create(self, run: Mapping[str, Any]) -> None:
        """Makes the directories and writes run.json, atomically."""
        for directory in (self.path, self.rollouts, self.checkpoints, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        replace_file(self.run_file, json.dumps(run, indent=2) + "\n")

    def cut_back(self, update: int, last_metrics: Mapping[str, Any] | None) -> None:
        """Removes what was written after `update`, the one of the checkpoint that is resumed.

        A killed run may have gone on past its last checkpoint, or been killed between the checkpoint and the line of
        metrics that follows it: `last_metrics`, saved in the checkpoint, replaces a missing line.
        """
        lines = {line["update"]: line for line in read_json_lines(self.metrics_file) if line["update"] <= update}
        if last_metrics is not None:
            lines.setdefault(update, dict(last_metrics))
        replace_file(self.metrics_file, "".join(_line(lines[number]) for number in sorted(lines)))
        for file in self.rollouts.glob("update_*.jsonl"):
            if (match := ROLLOUT_NAME.search(file.name)) and int(match[1]) > update:
                file.unlink()

    def write_rollouts(self, update: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Writes every sample of an update, whole or not at all."""
        replace_file(self.rollouts / f"update_{update:07d}.jsonl", "".join(map(_line, samples)))

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """One line, on disk when this returns."""
        append_line(self.metrics_file, metrics)

    def append_event(self, event: str, **details: Any) -> None:
        """Something that happened to the run, with the time."""
        append_line(
            self.events_file, {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **details}
        )


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that this module wrote; a last line cut off by a crash is dropped.

    Raises:
        ValueError: another line is damaged.
    """
    lines = path.read_text().split("\n") if path.exists() else []
    got = []
    for number, line in enumerate(lines, start=1):
        try:
            got += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: damaged line ({error})") from error
    return got


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(_line(value))
        file.flush()
        os.fsync(file.fileno())


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False) + "\n"
