"""Entry point of an engine process: `python -m adapters.vllm_engine.process --address ADDRESS --settings JSON`.

Standard input is a pipe whose other end the client holds: when it closes, for whatever reason, this process ends.
"""

from __future__ import annotations

import argparse
import os
import threading

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
}


def environment(base: dict[str, str], *, cuda: bool) -> dict[str, str]:
    """The environment of an engine process: what it must have, and defaults that the caller's may override."""
    defaults = {} if cuda else CPU_ENVIRONMENT
    return {**defaults, **base, **ENVIRONMENT}


def _end_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--settings", required=True)
    arguments = parser.parse_args()
    _end_with_parent()

    import zmq

    from .service import Service
    from .settings import EngineSettings

    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(arguments.address)
    service = Service(EngineSettings.from_json(arguments.settings), socket)
    service.run()
    service.core.close()
    socket.close(linger=1000)
    os._exit(0)  # what is left are destructors that have nothing to save and may take seconds


if __name__ == "__main__":
    main()
