"""A torch profiler trace of some updates, one file a process: OUT/logs/profile_rank0.json, for chrome://tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.ranks import rank


def parse_updates(text: str) -> range | None:
    """Reads the setting `profile`: START:STOP, both updates included; nothing profiles nothing.

    Raises:
        ValueError: it is written otherwise, or not 1 <= START <= STOP.
    """
    if not text:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"profile: got {text!r}, expected START:STOP with 1 <= START <= STOP")
    return range(int(first), int(last) + 1)


class Profiler:
    """Records the updates of a range, and writes the trace after the last of them that the run makes."""

    def __init__(self, updates: range | None, logs: Path) -> None:
        self.updates, self.path = updates, logs / f"profile_rank{rank()}.json"
        self._running: Any = None

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Around each update."""
        if self.updates is not None and number in self.updates and self._running is None:
            from torch.profiler import profile

            self._running = profile()
            self._running.start()
        yield
        if self.updates is not None and number == self.updates[-1]:
            self._write()

    def _write(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running.export_chrome_trace(str(self.path))
            self._running = None
