"""A process that owns an engine and waits to be killed. Its engine is forked from itself: no second import of vLLM."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from adapters.contract import Version
from adapters.vllm_engine.client import forkserver
from adapters.vllm_engine.client.local import LocalEngine


class OwnServer(forkserver._Client):
    """A fork server that is a fork of this process, which has vLLM imported already."""

    alive = True

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._control.close()
            os.dup2(theirs.fileno(), 0)
            forkserver._serve(theirs)
            os._exit(0)
        theirs.close()


def main(arguments: Sequence[str]) -> None:
    """`MODEL LOG REPORT [TENSOR_PARALLEL]`: starts an engine, publishes MODEL to it, reports its pid, sleeps."""
    from .conftest import settings_for

    model, log, report = map(Path, arguments[:3])
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    forkserver._server = OwnServer()
    parallel = int(arguments[3]) if arguments[3:] else 1
    module = "tests.contracts.engine.faults" if parallel > 1 else "adapters.vllm_engine.process.main"
    engine = LocalEngine(settings_for(model, log, tensor_parallel=parallel), module=module)
    engine.publish(Version(1, 1), load_file(model / "model.safetensors"))
    report.with_suffix(".new").write_text(str(engine.pid))
    report.with_suffix(".new").rename(report)
    time.sleep(600)
    sys.exit(1)
