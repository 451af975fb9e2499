"""Names of files that die with a process, so that the next start can remove what a killed one left behind."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path

WEIGHTS, ENGINE = "tether-weights", "tether-engine"
_counter = itertools.count()


def memory_directory() -> Path:
    """Where buckets of weights live: memory-backed where the system has it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def owned_name(kind: str) -> str:
    """A new name that says which process owns it: by pid and start time, because pids come back."""
    return f"{kind}-{os.getpid()}-{_started(os.getpid())}-{next(_counter)}"


def remove_abandoned() -> list[Path]:
    """Removes the files and folders of processes that no longer run. Returns what was removed."""
    removed = []
    for folder in {memory_directory(), Path(tempfile.gettempdir())}:
        for path in folder.glob("tether-*"):
            kind, _, rest = path.name.removeprefix("tether-").partition("-")
            pid, started, *_ = (*rest.split("-"), "", "")
            if f"tether-{kind}" in (WEIGHTS, ENGINE) and pid.isdigit() and started != _started(int(pid)):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
