"""A sign of life that costs no message: a page of memory, written by the engine process and read by its client.

Two numbers: when the process last beat, and how much it has done. A stopped or crashed process stops beating; a process
that waits for something that never comes beats on without progress; a long step beats and is followed by progress.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from pathlib import Path

BEAT_SECONDS = 0.2
_BEAT, _PROGRESS = struct.Struct("d"), struct.Struct("Q")
_PAGE_BYTES = 16


def _map(path: Path, *, create: bool) -> mmap.mmap:
    with open(path, "x+b" if create else "r+b") as file:
        if create:
            file.truncate(_PAGE_BYTES)
        return mmap.mmap(file.fileno(), _PAGE_BYTES)


class Heart:
    """The engine process's end. A thread beats as long as the interpreter runs threads at all."""

    def __init__(self, path: Path) -> None:
        self._page = _map(path, create=False)
        self._progress = 0
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def progress(self) -> None:
        """Something was finished: a call, a step, a tensor."""
        self._progress += 1
        self._page[_BEAT.size :] = _PROGRESS.pack(self._progress)

    def _run(self) -> None:
        while True:
            # In one copy: pack_into clears the bytes first, and a reader in between would see a beat at time 0.
            self._page[: _BEAT.size] = _BEAT.pack(time.monotonic())
            time.sleep(BEAT_SECONDS)


class Pulse:
    """The client's end. Makes the page; a process that has not beaten yet counts as beating."""

    def __init__(self, path: Path) -> None:
        self._page = _map(path, create=True)
        self._page[: _BEAT.size] = _BEAT.pack(time.monotonic())

    @property
    def seconds_since_beat(self) -> float:
        """CLOCK_MONOTONIC is one clock for all processes of a machine."""
        return time.monotonic() - _BEAT.unpack_from(self._page, 0)[0]

    @property
    def progress(self) -> int:
        return _PROGRESS.unpack_from(self._page, _BEAT.size)[0]
