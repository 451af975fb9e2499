"""Runs what must hold on CUDA and records it: tests/gpu, and the engine contract's suite for the local engine.

    python -m tests.gpu.record [--workers 6] [--name gpu_tests] [--commit ID] [pytest arguments, such as -k publication]

Writes benchmarks/results/NAME.json, after every test anew: outcome, seconds, what the test printed (the measured
figures), and the end of its error. Exits as pytest does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record

WORKER = re.compile(r"^\[gw\d+\].*\n")
"""The line in which pytest-xdist says where an error comes from: the interpreter's path is of no interest."""
FOLDER = Path(__file__).parent
CONTRACT = [
    str(FOLDER.parent / "contracts" / "engine" / f"test_{name}.py")
    for name in ("generate", "score", "publish", "turns", "leaks")
]
TESTS = [str(FOLDER), *CONTRACT]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=6, help="test files at a time; they share the devices")
    parser.add_argument("--name", default="gpu_tests", help="of the JSON")
    parser.add_argument("--commit", help="of a working tree without git")
    arguments, others = parser.parse_known_args(argv)
    recording = record.Recording(
        arguments.name,
        command=" ".join(["python -m tests.gpu.record", *others]),
        settings={"models": "tiny Ouro and OLMoE, std 0.02", "TRITON_F32_DEFAULT": "ieee"},
        commit_id=arguments.commit,
    )
    options = ["-q", "-n", str(arguments.workers), "--dist", "loadfile", "--no-loadscope-reorder", "--tb=short"]
    options += ["-m", "not slow", "-p", "no:cacheprovider", *others]
    return int(pytest.main([*TESTS, *options], plugins=[Recorder(recording)]))


class Recorder:
    """A plugin of pytest: every report goes into the JSON at once, so that a run cut short has said what it saw."""

    def __init__(self, recording: record.Recording) -> None:
        self._recording = recording
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.removeprefix("tests/")
        entry: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        if printed := [line for line in report.capstdout.splitlines() if line.strip()]:
            entry["printed"] = [line[:300] for line in printed[:20]]
        if report.failed:
            entry |= {"when": report.when, "error": WORKER.sub("", report.longreprtext)[-1500:]}
        if report.skipped and isinstance(report.longrepr, tuple):
            entry["why"] = report.longrepr[2]
        self.tests[name] = entry
        outcomes = [test["outcome"] for test in self.tests.values()]
        counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
        self._recording.save(**counts, tests=self.tests)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.tests and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._recording.finish()


if __name__ == "__main__":
    sys.exit(main())
