"""Starts processes that end with this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from adapters.vllm_engine.client import forkserver
from adapters.vllm_engine.process.main import environment

PROCESS = "adapters.vllm_engine.process.main"
"""What runs in an engine process."""
Process = subprocess.Popen[bytes] | forkserver.ForkedProcess


def start_process(
    module: str, arguments: Sequence[str], *, log_path: Path, start_method: str | None, seconds: float
) -> Process:
    """Starts a process in a session of its own, which ends when its standard input, a pipe from here, closes.

    Args:
        start_method: "spawn", "forkserver", or None for the fork server where no CUDA device is.
        seconds: longest wait for the fork server.

    Raises:
        OSError: it could not be started.
    """
    cuda = torch.cuda.is_available()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    env = environment(dict(os.environ), cuda=cuda)
    with open(log_path, "ab") as log:
        if (start_method or ("spawn" if cuda else "forkserver")) == "forkserver":
            return forkserver.fork(module, arguments, log=log, environment=env, seconds=seconds)
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True)
