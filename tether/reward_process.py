"""Runs a reward function in processes of its own: one that raises, hangs or crashes costs that sample, not the run."""

from __future__ import annotations

import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
"""Longest that a reward function's module may take to import."""
NUM_PROCESSES = min(4, os.cpu_count() or 1)

logger = logging.getLogger(__name__)
Judge = Callable[[Sequence[Mapping[str, Any]]], list[float | None]]
"""Keyword arguments of `checked_reward`, one a sample -> rewards in their order, None for a sample without one."""


class RewardProcesses:
    """A `Judge`. Processes start when they are needed; one that does not answer in time is killed and replaced.

    Args:
        name: module:function of the reward function.
        timeout_seconds: longest for one sample.
        log_path: where the function's own output goes.
    """

    def __init__(self, name: str, *, timeout_seconds: float, log_path: Path) -> None:
        self.name, self.timeout_seconds, self.log_path = name, timeout_seconds, log_path
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(_Process(self))

    def __enter__(self) -> RewardProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        while not self._idle.empty():
            self._idle.get().stop()

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """See `Judge`. Failures are logged, the first ones with their reasons.

        Raises:
            RuntimeError: every sample failed, so the function and not the samples is to blame.
        """
        with ThreadPoolExecutor(NUM_PROCESSES) as threads:
            outcomes = list(threads.map(self._one, samples))
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, str)]
        for text in failures[:5]:
            logger.warning("no reward: %s", text)
        if samples and len(failures) == len(samples):
            raise RuntimeError(
                f"the reward function {self.name!r} failed for all {len(samples)} samples: {failures[0]}"
            )
        return [None if isinstance(outcome, str) else outcome for outcome in outcomes]

    def _one(self, sample: Mapping[str, Any]) -> float | str:
        process = self._idle.get()
        try:
            return process.ask(sample)
        finally:
            self._idle.put(process)


class _Process:
    """One process, used by one thread at a time."""

    def __init__(self, owner: RewardProcesses) -> None:
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, sample: Mapping[str, Any]) -> float | str:
        """The reward, or why there is none."""
        where = sample.get("where", "a sample")
        try:
            self._ensure_started()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(sample).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(self._owner.timeout_seconds))
        except TimeoutError:
            self.stop()
            return f"{where}: the reward function did not answer within {self._owner.timeout_seconds:g} s"
        except (OSError, EOFError):
            self.stop()
            return f"{where}: the process of the reward function died, see {self._owner.log_path}"
        return answer["error"] if "error" in answer else float(answer["value"])

    def stop(self) -> None:
        """Ends the process, if there is one. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._rest = None, b""

    def _ensure_started(self) -> None:
        if self._process is not None:
            return
        command = [sys.executable, "-m", "tether.reward_worker", self._owner.name]
        with self._owner.log_path.open("a") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        self._line(START_SECONDS)

    def _line(self, seconds: float) -> bytes:
        """The next line of its output. Raises TimeoutError, or EOFError if it ended."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise EOFError
                self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line
