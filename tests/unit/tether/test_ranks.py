"""Two trainer processes: what rank 0 does alone reaches the other, errors included."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tether.ranks import from_rank_zero, rank

ROOT = Path(__file__).resolve().parents[3]


def main(store: str) -> None:
    """One of the processes: a value, then an error."""
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank(), world_size=world, timeout=timedelta(seconds=30)
    )
    calls: list[int] = []

    def value() -> list[int]:
        calls.append(rank())
        return [1, 2, 3]

    def failure() -> None:
        raise KeyError("no such prompt")

    assert from_rank_zero(value) == [1, 2, 3]
    assert calls == ([0] if rank() == 0 else [])
    try:
        from_rank_zero(failure)
    except KeyError:
        assert rank() == 0
    except RuntimeError as error:
        assert rank() == 1 and str(error) == "rank 0 failed: KeyError: 'no such prompt'"
    else:
        raise AssertionError("the error did not arrive")
    assert from_rank_zero(value) == [1, 2, 3], "the group is usable after an error"
    dist.destroy_process_group()


def test_rank_zero_shares_results_and_errors(tmp_path: Path) -> None:
    """A rank that is not told of an error would wait for a broadcast until its deadline."""
    command = [sys.executable, "-m", "tests.unit.tether.test_ranks", str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "RANK": str(number), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def test_a_process_alone_just_works() -> None:
    """No process group is needed for one rank."""
    assert rank() == 0 and from_rank_zero(lambda: 7) == 7


if __name__ == "__main__":
    main(sys.argv[1])
