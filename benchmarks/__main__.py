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
    ["rollout", "--model", "olmoe-1b-7b"],
    ["disaggregated"],
    *(["publication", "--device", "cuda", "--staging", staging] for staging in ("host", "shadow", "ipc")),
    ["train_replay", "--profile"],
    ["logprob", "--profile"],
    ["olmoe_train", "--profile"],
    ["memory"],
    ["difference"],
    ["full_size", "--model", "ouro-1.4b"],
    ["full_size", "--model", "ouro-1.4b", "--part", "one-slot"],
    ["full_size", "--model", "ouro-1.4b", "--part", "updates"],
    ["full_size", "--model", "olmoe-1b-7b"],
)
TWO_DEVICES = (["full_size", "--model", "olmoe-1b-7b-ep2"],)


def main() -> int:
    """Exit status 1 if one failed; the others have run."""
    failed = []
    several = TWO_DEVICES if torch.cuda.device_count() > 1 else ()
    for module, *arguments in (*CUDA, *several) if torch.cuda.is_available() else CPU:
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        print(" ".join(command[1:]), flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(module)
    subprocess.run([sys.executable, "-m", "benchmarks.tables"], check=False)
    print(f"failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
