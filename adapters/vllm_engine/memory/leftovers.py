"""Names of files that die with a process, so that the next start can remove what a killed one left behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path

WEIGHTS, ENGINE = "tether-weights", "tether-engine"
_NAME = re.compile(rf"({WEIGHTS}|{ENGINE})-(?P<pid>\d+)-(?P<started>\d+)\.(?P<namespace>\d+)-\d+")
_counter = itertools.count()


def memory_directory() -> Path:
    """Where buckets of weights live: memory-backed where the system has it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def owned_name(kind: str) -> str:
    """A new name that says which process owns it: by pid, and by start time and namespace, because pids come back."""
    return f"{kind}-{os.getpid()}-{_started(os.getpid())}.{_namespace()}-{next(_counter)}"


def remove_abandoned(*folders: Path) -> list[Path]:
    """Removes the files and folders of processes that no longer run, there and where they usually are.

    Returns what was removed.

    Containers may share the folder and not see each other's processes: names of another pid namespace are left alone.
    """
    removed = []
    for folder in {memory_directory(), Path(tempfile.gettempdir()), *folders}:
        for path in folder.glob("tether-*"):
            if (match := _NAME.fullmatch(path.name)) and match["namespace"] == _namespace():
                if match["started"] == _started(int(match["pid"])):
                    continue
                with contextlib.suppress(PermissionError):  # another user's, who will remove it
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                    removed.append(path)
    return removed


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@functools.cache
def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)
