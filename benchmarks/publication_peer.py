"""vLLM's own way to send weights over CUDA IPC, driven into an engine process like ours: what publication is beside.

It checks nothing, keeps no way back and leaves caches as they are; the tensors travel by handle, and vLLM's loader
copies them twice. Trainer and process talk over a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from adapters.hf_convert.digest import render_digest
from adapters.hf_convert.digests import finite_digests
from adapters.vllm_engine.process.main import environment
from adapters.vllm_engine.settings import EngineSettings

WAIT_SECONDS = 120.0


class PipeClient:
    """vLLM's `VLLMWeightSyncClient`: what a trainer's half of a transfer asks of the engine."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises RuntimeError for what failed there, or no answer in time."""
        self._pipe.send((method, arguments))
        return self.answer()

    def answer(self) -> Any:
        if not self._pipe.poll(WAIT_SECONDS):
            raise RuntimeError(f"the peer's engine gave no answer for {WAIT_SECONDS:.0f} s")
        is_error, value = self._pipe.recv()
        if is_error:
            raise RuntimeError(f"the peer's engine failed: {value}")
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")


def measure(client: PipeClient, weights: dict[str, torch.Tensor], repeats: int) -> dict[str, list[float]]:
    """Waits for the engine -> seconds of each transfer, by kind.

    Weights are changed before each transfer; what is served after a kind's last one is compared with them.
    "tensors" sends a handle of each tensor; "packed" copies all of them into one buffer first.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    size = sum(tensor.nbytes for tensor in weights.values())
    seconds: dict[str, list[float]] = {}
    client.answer()  # it is up
    for kind in ("tensors", "packed"):
        # In one chunk: a model that demands every tensor takes them in one call.
        info = IPCTrainerInitInfo(rank=0, packed=kind == "packed", packed_buffer_size_bytes=size)
        sender = IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=weights.items())
        rounds = []
        for _ in range(repeats + 2):
            for tensor in weights.values():
                tensor.mul_(1.001)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            sender.send_weights()
            rounds.append(time.perf_counter() - begin)
        seconds[kind] = rounds[2:]
        _check(client, weights)
    return seconds


def _check(client: PipeClient, weights: dict[str, torch.Tensor]) -> None:
    served = {
        name: render_digest(total) for name, (total, _) in client.call("tether_weights_call", "fingerprint").items()
    }
    wanted = dict(zip(weights, (digest for digest, _ in finite_digests(list(weights.values()))), strict=True))
    assert served == wanted, "the peer serves other weights than it was sent"


@contextmanager
def engine(settings: EngineSettings) -> Iterator[PipeClient]:
    """Starts the process; `measure` waits for it."""
    ours, theirs = multiprocessing.Pipe()
    os.environ.update(environment(dict(os.environ), cuda=torch.cuda.is_available()))
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(settings.to_json(), theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield PipeClient(ours)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _serve(settings: str, pipe: Connection) -> None:
    """Answers until the pipe closes. Each call is one of a worker's methods."""
    from adapters.vllm_engine.process.core import Core

    core = Core(EngineSettings.from_json(settings))
    core.engine.collective_rpc(_install)
    pipe.send((False, None))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_answer(core, method, arguments))


def _answer(core: Any, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
    try:
        return False, core.engine.collective_rpc(method, args=tuple(arguments))[0]
    except Exception as error:
        return True, repr(error)


def _install(wrapper: Any) -> None:
    """Gives the worker the engine that `weight_transfer_config` would have given it."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    worker = wrapper.worker
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="ipc"), worker.vllm_config, worker.device, worker.model_runner.get_model()
    )
