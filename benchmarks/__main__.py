"""Runs every benchmark that this machine can, one process each, and makes the tables in docs anew.

python -m benchmarks
"""

from __future__ import annotations

import subprocess
import sys

import torch

CPU = (
    ["publication"],
    ["replay"],
    ["checkpoint"],
    ["export_memory"],
)
CUDA = (
    ["rollout"],
    ["disaggregated"],
    *(["publication", "--device", "cuda", "--staging", staging] for staging in ("host", "shadow", "ipc")),
    ["train_replay", "--profile"],
    ["logprob", "--profile"],
    ["olmoe_train", "--profile"],
)


def main() -> int:
    """Exit status 1 if one failed; the others have run."""
    failed = []
    for module, *arguments in CUDA if torch.cuda.is_available() else CPU:
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        print(" ".join(command[1:]), flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(module)
    subprocess.run([sys.executable, "-m", "benchmarks.tables"], check=False)
    print(f"failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
