"""The steps of `benchmarks.full_size`: each is a process of its own, timed, and its failure is a result too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.full_size_plans import Plan
from benchmarks.shapes import SHAPES, write_prompts
from tether.run_directory import read_json_lines as read_lines

TIMES = ("_seconds", "_per_second", "_mfu", "_bytes")
"""What a metric ends with that a repetition does not repeat."""
MAX_FACTOR, MEAN_FACTOR = 3, 2
"""How often its own bf16 error the trainer may be apart from the engine."""
FEWEST_TOKENS = 64
"""Of a depth, for a verdict: the largest of a few errors says little."""

NUM_QUIET = 4
"""Updates whose phases are measured by themselves."""


class Steps:
    """Results so far, written after every step.

    Args:
        folder: everything is written there, and deleted by the caller.
        more: key=value settings over the plan's.
        limit_seconds: of all steps together.
        write: gets the results so far.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        more: Sequence[str],
        limit_seconds: float,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.plan, self.folder, self.more, self._write = plan, folder, list(more), write
        self._begun = time.monotonic()
        self._end = self._begun + limit_seconds
        self.results: dict[str, Any] = {"seconds": {}}
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, name: str, action: Callable[[], Any]) -> bool:
        """Runs a step; what it returns is its result. False if it failed."""
        begun = time.perf_counter()
        try:
            self.results[name] = action()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace(str(self.folder), "FOLDER").replace(
                sys.executable, "python"
            )
            self.results[name] = {"error": text[-3000:]}
            self.failed.append(name)
        self.results["seconds"][name] = round(time.perf_counter() - begun, 1)
        print(f"{name}: {self.results['seconds'][name]} s{' FAILED' * (name in self.failed)}", flush=True)
        self.results["failed"] = self.failed
        with self._lock:
            self._write(self.results)
        return name not in self.failed

    def process(self, *arguments: str, until: Callable[[], bool] = lambda: False) -> str:
        """Runs a module of this project in a process of its own, or kills it once `until` holds; what it said.

        Raises:
            RuntimeError: it failed, or there was no time left; with the end of what it said.
        """
        what, lines = " ".join(arguments[:3]), list[str]()
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4)), **os.environ},  # torchrun's choice is 1
        )
        reader = threading.Thread(target=self._show, args=(process, lines), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                if until():
                    return "".join(lines)
                if time.monotonic() > self._end:
                    raise TimeoutError("no time is left")
                time.sleep(0.2)
        except BaseException as error:
            raise RuntimeError(f"{what} was not done: {error}\n{''.join(lines[-40:])}") from error
        finally:
            process.kill()
        reader.join(5)
        if process.returncode:
            raise RuntimeError(f"{what} ended with {process.returncode}:\n{''.join(lines[-60:])}")
        return "".join(lines)

    def _show(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        """Prints what a process says as it says it, with the seconds since the beginning."""
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(f"{time.monotonic() - self._begun:6.1f} {line}", end="", flush=True)

    def stop(self) -> None:
        """No time is left: the step that runs fails, and those after it."""
        self._end = time.monotonic()
        raise TimeoutError("asked to end")

    def inputs(self) -> None:
        """Writes model and prompts, once."""
        if not (self.folder / "model").exists():
            self.process("benchmarks.shapes", self.plan.model, str(self.folder / "model"))
            write_prompts(
                self.folder / "data.jsonl",
                vocab_size=SHAPES[self.plan.model]["vocab_size"],
                count=self.plan.num_prompts,
                length=self.plan.prompt_tokens,
            )

    def drive(self, out: Path, updates: int, settings: dict[str, Any], *more: str, kill_at: int | None = None) -> None:
        """One process of the driver (or its launcher), up to an update; killed once that of `kill_at` is durable."""
        before = len(read_lines(out / "events.jsonl"))

        def is_saved() -> bool:
            new = [line for line in read_lines(out / "events.jsonl")[before:] if line["event"] == "saved"]
            is_told = any(line["update"] == kill_at for line in read_lines(out / "metrics.jsonl"))
            return is_told and any(line["update"] == kill_at for line in new)

        module = ["tether.train"] if self.plan.processes == 1 else ["tether.launch", "--max-restarts", "0"]
        files = {"model": self.folder / "model", "data": self.folder / "data.jsonl", "out": out}
        command = [*module, *(text for name, path in files.items() for text in (f"--{name}", str(path)))]
        for pair in [*(f"{name}={_text(value)}" for name, value in settings.items()), *self.more]:
            command += ["--set", pair]
        try:
            self.process(*command, "--updates", str(updates), *more, until=is_saved)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            logs = sorted((out / "logs").glob("*.log")) if (out / "logs").is_dir() else []
            ends = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
            raise RuntimeError(f"{error}\n{ends}") from error


def recipe(steps: Steps) -> None:
    """Updates with a kill and a resume in the middle, the export, and the yardstick beside what runs anyway."""
    plan, out = steps.plan, steps.folder / "run"
    if not steps("inputs", steps.inputs):
        return
    scored: list[int] = []
    with ThreadPoolExecutor(2) as beside:
        for number, stop in enumerate(plan.stops):
            more, kill_at = ["--resume"] if number else [], None if stop == plan.stops[-1] else stop
            name = f"process {number + 1}"
            ended = steps(name, lambda m=more, k=kill_at: steps.drive(out, plan.stops[-1], plan.recipe, *m, kill_at=k))
            metrics = read_lines(out / "metrics.jsonl")
            new = [line["update"] for line in metrics if line["update"] not in scored]
            if new:
                beside.submit(steps, f"yardstick {number + 1}", lambda n=new, m=metrics: yardstick(steps, out, n, m))
            scored += new
            if not ended:
                break
        steps("metrics", lambda: metrics)
        steps("memory", lambda: memory(metrics))
        if (out / "hf").is_dir():
            beside.submit(steps, "verify", lambda: verify(steps, out))
    parts = [steps.results.pop(name) for name in list(steps.results) if name.startswith("yardstick ")]
    steps("yardstick", lambda: [row for part in parts if isinstance(part, list) for row in part])


def updates(steps: Steps) -> None:
    """A few updates of one process, and nothing beside them: what their phases take."""
    out = steps.folder / "updates"
    if steps("inputs", steps.inputs):
        steps("process", lambda: steps.drive(out, NUM_QUIET, steps.plan.recipe))
        steps("metrics", lambda: read_lines(out / "metrics.jsonl"))


def verify(steps: Steps, out: Path) -> list[str]:
    """The table of `tether.convert verify`; against the last checkpoint where there is one."""
    against = ["--against", str(out)] if any((out / "checkpoints").glob("iter_*")) else []
    text = steps.process("tether.convert", "verify", str(out / "hf"), *against, *steps.plan.verify)
    text = text.replace(str(steps.folder), "FOLDER")
    return [line for line in text.strip().splitlines() if re.match(r"\S.*\s{2,}(ok|FAILED|-)\s{2,}", line)]


def yardstick(
    steps: Steps, out: Path, updates: Sequence[int], metrics: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Per update and depth: the difference that training met, beside the trainer's own error on the same samples."""
    found = steps.folder / f"yardstick{updates[0]}.json"
    tokens = str(steps.plan.recipe["tokens_per_microbatch"])
    steps.process(
        "benchmarks.yardstick", str(steps.folder / "model"), str(out / "rollouts"), str(found),
        "--tokens-per-microbatch", tokens, "--updates", *map(str, updates),
    )  # fmt: skip
    rows = []
    for row in json.loads(found.read_text()):
        line = next(line for line in metrics if line["update"] == row["update"])
        ending = "" if row["depth"] is None else f"_depth_{row['depth']}"
        met = {name: line[f"logprob_diff_{name}{ending}"] for name in ("mean", "max")}
        within = met["max"] <= MAX_FACTOR * row["own"]["max"] and met["mean"] <= MEAN_FACTOR * row["own"]["mean"]
        judged = within if row["count"] >= FEWEST_TOKENS else None
        rows.append({**row, "execution": line["execution"], "trainer_to_engine": met, "within": judged})
    return rows


def memory(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Largest figures of the first trainer's device; what is not the trainer's is the engine's and the contexts'."""
    lines = [line for line in metrics if "train_peak_bytes" in line]
    if not lines:
        return {}
    figures = {name: max(line[name] for line in lines) for name in ("train_peak_bytes", "device_used_bytes")}
    return {**figures, "others_bytes": max(line["device_used_bytes"] - line["train_reserved_bytes"] for line in lines)}


def one_slot(steps: Steps) -> None:
    """Two updates in one go, and the second one again from the checkpoint of the first."""
    settings, out = steps.plan.one_slot, steps.folder / "one_slot"
    shutil.rmtree(steps.folder / "run", ignore_errors=True)
    if settings is None:
        steps.results["one_slot"] = "not run: the training state does not fit the disk"
        return
    if not steps("inputs", steps.inputs):
        return
    if not steps("one slot, straight", lambda: steps.drive(out, 2, settings, kill_at=2)):
        return
    before, straight = Facts(steps, out, 1), Facts(steps, out, 2)
    with ThreadPoolExecutor(1) as beside:
        straight.set_aside()
        beside.submit(steps, "one slot, digests", lambda: [straight.read(), before.read(parameters_only=True)] and None)
        if not steps("one slot, resumed", lambda: steps.drive(out, 2, settings, "--resume-from", "1", kill_at=2)):
            return
    steps("one_slot", lambda: straight.compare(Facts(steps, out, 2).read(), before))


class Facts:
    """What an update left: digests of all stored tensors, samples, metrics."""

    def __init__(self, steps: Steps, out: Path, update: int) -> None:
        self._steps, self._out, self._update = steps, out, update
        self._checkpoint = out / "checkpoints" / f"iter_{update:07d}"
        self._aside: Path | None = None
        self.tensors: dict[str, str] = {}
        self.rollouts = read_lines(out / "rollouts" / f"update_{update:07d}.jsonl")
        lines = read_lines(out / "metrics.jsonl")
        self.metrics = [without_times(line) for line in lines if line["update"] == update]

    def set_aside(self) -> None:
        """Moves the checkpoint away from its run; `read` then removes it: there is room for two and a bit."""
        self._aside = self._checkpoint.rename(self._steps.folder / f"aside_{self._update}")

    def read(self, *, parameters_only: bool = False) -> Facts:
        found = self._steps.folder / f"digests{self._update}{bool(self._aside)}.json"
        choice = ["--parameters"] if parameters_only else []
        where = str(self._aside or self._checkpoint)
        self._steps.process("benchmarks.full_size_digests", where, str(found), *choice)
        self.tensors = json.loads(found.read_text())
        if self._aside is not None:
            shutil.rmtree(self._aside)
        return self

    def compare(self, other: Facts, before: Facts) -> dict[str, Any]:
        """Raises RuntimeError if anything differs, or if the update changed nothing."""
        names = self.tensors.keys() | other.tensors.keys()
        apart = sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))
        for sample in self.rollouts + other.rollouts:
            sample.pop("weight_version")  # the incarnation counts resumes
        found = {
            "tensors": len(names),
            "of_the_optimizer": sum(name.startswith("optimizer.") for name in names),
            "tensors_that_differ": len(apart),
            "first_that_differ": apart[:10],
            "samples": len(self.rollouts),
            "samples_that_differ": sum(a != b for a, b in zip(self.rollouts, other.rollouts, strict=True)),
            "metrics_that_differ": sorted(
                name for a, b in zip(self.metrics, other.metrics, strict=True) for name in a if a[name] != b.get(name)
            ),
            "parameters_that_the_update_changed": sum(
                self.tensors[name] != value for name, value in before.tensors.items()
            ),
        }
        is_equal = not (apart or found["samples_that_differ"] or found["metrics_that_differ"])
        if not is_equal or not found["parameters_that_the_update_changed"]:
            raise RuntimeError(json.dumps(found))
        return found


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.endswith(TIMES)}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
