"""What a long run must not accumulate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from adapters.vllm_engine.memory.leftovers import memory_directory

from .conftest import make_requests, next_version, run

PUBLICATIONS = 50


def held(pid: int) -> dict[str, int]:
    """Resident bytes, open files, mapped buckets and threads of a process."""
    process = Path(f"/proc/{pid}")
    return {
        "resident": int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "files": len(list((process / "fd").iterdir())),
        "buckets": (process / "maps").read_text().count("tether-weights-"),
        "threads": len(list((process / "task").iterdir())),
    }


def test_fifty_publications_leave_nothing_behind(
    engine: Any, restore: None, weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor]
) -> None:
    """No growth in memory, open files, mappings, threads or shared memory segments, on either side."""

    def publish(times: int) -> None:
        for i in range(times):
            engine.publish(next_version(engine), (weights, other_weights)[i % 2])
            run(engine, make_requests(f"leak-{i}", 1))

    def segments() -> int:
        return len(list(memory_directory().glob(f"tether-*-{os.getpid()}-*")))

    publish(10)  # allocators reach their size
    before, first = {pid: held(pid) for pid in (os.getpid(), engine.pid)}, segments()
    publish(PUBLICATIONS)
    after = {pid: held(pid) for pid in before}
    print(f"before {before}\nafter {after}")
    assert segments() == first
    for pid, was in before.items():
        growth = after[pid]["resident"] - was["resident"]
        # one retained version is 1.6 MB: a leak of one a publication would be 80 MB
        assert growth < 8 << 20, f"pid {pid}: {growth / 2**20:.1f} MB more resident after {PUBLICATIONS} publications"
        assert {**after[pid], "resident": 0} == {**was, "resident": 0}
