"""Entry point of an engine process: `python -m adapters.vllm_engine.process.main --directory DIR --settings JSON`.

Standard input is a pipe whose other end the client holds: when it closes, for whatever reason, this process ends, and
its workers with it. DIR holds the client's socket and the heartbeat. What ends the process is told by its exit status.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.contract import EngineDead, EngineOutOfMemory, EngineStartFailed, PluginMissing

if TYPE_CHECKING:
    from adapters.vllm_engine.settings import EngineSettings

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the engine core: no further one
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose hooks worker.py relies on, on CPU and GPU alike
    "VLLM_PLUGINS": "tether",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else the log-prob code compiles for 15 s at the first generation
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch allocates large tensors in huge pages: packing weights is page faults, else
}
CUDA_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # as above; nothing else of ours is compiled
    "TRITON_F32_DEFAULT": "ieee",  # else Triton attention multiplies fp32 as TF32, 1000 times coarser
}
ORPHANED = 3
STATUS: dict[int, type[EngineDead]] = {70: EngineOutOfMemory, 71: PluginMissing, 72: EngineStartFailed}
"""Exit status of a process that knows why it ends -> the error that its client raises."""


def environment(base: dict[str, str], *, cuda: bool) -> dict[str, str]:
    """The environment of an engine process: what it must have, and defaults that the caller's may override."""
    defaults = CUDA_ENVIRONMENT if cuda else CPU_ENVIRONMENT
    return {**defaults, **base, **ENVIRONMENT}


def own_environment(settings: EngineSettings) -> dict[str, str]:
    """What one engine's own settings put into its environment, and into nobody else's."""
    variables = {}
    if settings.devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(max(settings.devices) + 1)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in settings.devices)
    if settings.transfer is not None:
        variables["UCX_TLS"] = settings.transfer.transports
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.transfer.host
    return variables


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs an engine until its client ends it. Does not return."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--settings", required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the client, which decides
    end_with_parent()
    try:
        _serve(options.directory, options.settings)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        status = _status_of(error)
    _end(status)


def _serve(directory: Path, settings: str) -> None:
    import zmq

    from adapters.vllm_engine.process.heartbeat import Heart
    from adapters.vllm_engine.settings import EngineSettings

    engine_settings = EngineSettings.from_json(settings)
    os.environ.update(own_environment(engine_settings))  # before anything reads it

    from adapters.vllm_engine.process.service import Service

    heart = Heart(directory / "heartbeat")
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(f"ipc://{directory}/socket")
    try:
        service = Service(engine_settings, socket, heart)
    except (PluginMissing, MemoryError):
        raise
    except Exception as error:
        raise error if _is_out_of_memory(error) else EngineStartFailed(repr(error)) from error
    service.run()
    service.core.close()
    socket.close(linger=1000)


def end_with_parent() -> None:
    """Ends this process when its standard input closes."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        _end(ORPHANED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _end(status: int) -> None:
    """Ends this process and vLLM's workers, at once: destructors that have nothing to save may take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)


def _status_of(error: BaseException) -> int:
    if _is_out_of_memory(error):
        return next(status for status, kind in STATUS.items() if kind is EngineOutOfMemory)
    return next((status for status, kind in STATUS.items() if type(error) is kind), 1)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """torch raises OutOfMemoryError on CUDA, and on CPU a plain RuntimeError that only its text tells apart."""
    while error is not None:
        text = f"{type(error).__name__}: {error}".lower()
        if isinstance(error, MemoryError) or "outofmemory" in text or "out of memory" in text:
            return True
        if "can't allocate memory" in text or "cannot allocate memory" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
