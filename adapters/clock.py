"""How long the phases of something took."""

from __future__ import annotations

import time


class Clock:
    """Seconds of consecutive phases, to the microsecond."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a phase that began with the one before."""
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 6), now
