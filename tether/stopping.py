"""When a run is asked to stop: a signal or its time limit. The first request is kept for the end of the update.

A second signal ends the process at once, wherever it is; what is on disk is whole at every moment. It is seen by a
thread, because the main thread may be inside of a collective, where Python runs no signal handler.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from tether.progress import say

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 1.0
"""Signals that follow the first one sooner are the same request: a terminal and a launcher each send one."""


class StopRequests:
    """Watches for requests to stop while it is entered. Use it in the main thread.

    Args:
        limit_seconds: time from now after which to stop; 0 is no limit.
    """

    def __init__(self, *, limit_seconds: float = 0.0) -> None:
        self._deadline = time.monotonic() + limit_seconds if limit_seconds else None
        self._limit_seconds = limit_seconds
        self._signal: str | None = None
        self._since = 0.0

    def reason(self) -> str | None:
        """Why this process should stop after the update it is in, or None."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"time limit of {self._limit_seconds:g} s"
        return None

    def __enter__(self) -> StopRequests:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old: dict[Any, Any] = {each: signal.signal(each, lambda *_: None) for each in SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._old.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        while (byte := os.read(self._read, 1)) != b"\0":
            self._received(byte[0])

    def _received(self, number: int) -> None:
        if number not in SIGNALS:
            return
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = signal.Signals(number).name, now
            say(f"{self._signal}: stopping after this update, with a checkpoint; a second signal stops at once")
        elif now - self._since > REPEAT_SECONDS:
            say(f"{signal.Signals(number).name} again: stopping at once; the newest complete checkpoint is whole")
            os._exit(128 + number)
