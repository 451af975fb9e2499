"""An engine process that breaks where a test tells it to. Start it with `LocalEngine(settings, module=MODULE)`.

The product has no switch for faults. This module wraps its functions, in the engine process and its (forked) workers,
and then runs it. A test writes lines "step|fault" into the file that TETHER_TEST_FAULT names; a wrapper that finds its
own step there takes the line away and does what it says. "decode1:step|fault" is met by the worker of that name only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

MODULE = __name__
VARIABLE = "TETHER_TEST_FAULT"
STALL_SECONDS = 4.0
FIRST, LAST = "lm_head.weight", "model.norm.weight"
"""The tensors that come first and last in the tiny model's file, and so in the first and last bucket."""


_worker = ""
"""Name of this process among the workers of an engine of several."""


class Injected(RuntimeError):
    """The exception that a fault raises."""


def order(*lines: tuple[str, str]) -> None:
    """Tells the engine process where to break next: (step, fault), in the order in which they are met."""
    _rewrite([f"{step}|{fault}" for step, fault in lines])


def withdraw() -> list[str]:
    """Takes back what no step has met."""
    left = _lines()
    _rewrite([])
    return left


def due(step: str) -> str | None:
    """The fault ordered for this step, once."""
    for line in (lines := _lines()):
        ordered, _, fault = line.partition("|")
        if ordered in (step, f"{_worker}:{step}"):
            _rewrite([other for other in lines if other is not line])
            return fault
    return None


def _lines() -> list[str]:
    path = Path(os.environ[VARIABLE])
    return path.read_text().splitlines() if path.exists() else []


def _rewrite(lines: list[str]) -> None:
    path = Path(os.environ[VARIABLE])
    staging = path.with_suffix(f".{os.getpid()}")
    staging.write_text("\n".join(lines))
    staging.rename(path)


def happen(fault: str | None) -> None:
    """What a fault does to the process that meets it. Corruption and lost replies are done by who knows where."""
    if fault == "exception":
        raise Injected("injected")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stall":
        time.sleep(STALL_SECONDS)
    if fault == "memory":
        torch.empty(1 << 55)


def flip_byte(path: str | Path, offset: int) -> None:
    """Inverts one byte of a file, as a broken memory module would: nobody is told."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def wrap_workers() -> None:
    """Wraps `LiveWeights`; the last worker breaks."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    from adapters.vllm_engine.worker.weights import LiveWeights

    staged: list[Any] = []

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(live: Any, *args: Any) -> Any:
            if get_tensor_model_parallel_rank() != get_tensor_model_parallel_world_size() - 1:
                return original(live, *args)
            if name == "stage":
                staged.append(args[0])
            if name == "fingerprint":
                if due("read back") == "corrupt byte":
                    live._runner.get_model().model.norm.weight.data.view(torch.uint8)[5] ^= 0xFF
                return original(live, *args)
            fault = due(_stage_label(args[0]) if name == "stage" else name)
            if fault == "corrupt byte":
                flip_byte(staged[-1].location.path, staged[-1].placements[-1].offset + 5)
            happen(fault)
            return original(live, *args)

        return step

    for name in ("stage", "prepare", "commit", "settle", "rollback", "fingerprint", "_load_by_vllm"):
        setattr(LiveWeights, name, wrap(name, getattr(LiveWeights, name)))


def _stage_label(bucket: Any) -> str:
    names = {place.name for place in bucket.placements}
    return "stage first" if FIRST in names else "stage last" if LAST in names else "stage"


def wrap_engine() -> None:
    """Wraps what runs in the engine process: begin, verify, cache reset, replies, steps."""
    from adapters.vllm_engine.process import messages
    from adapters.vllm_engine.process.core import Core
    from adapters.vllm_engine.process.publication import Publication
    from adapters.vllm_engine.process.service import Service

    calls = {
        messages.Begin: "begin",
        messages.Stage: "stage first",
        messages.Prepare: "prepare",
        messages.Commit: "commit",
    }
    begin, verify = Publication.begin, Publication._verify
    drop, step, answer, send = Core.drop_caches, Core.step, Service._answer, Service._send

    def faulty_begin(self: Any, *args: Any) -> Any:
        happen(due("begin"))
        return begin(self, *args)

    def faulty_verify(self: Any, *args: Any) -> Any:
        happen(due("verify"))
        return verify(self, *args)

    def faulty_drop(self: Any) -> None:
        happen(due("cache reset"))
        drop(self)

    def faulty_step(self: Any, *args: Any) -> Any:
        running = self._running.values()
        happen(due("generate") if running else None)
        happen(due("decode") if any(r.token_ids for r in running) else None)
        happen(due("score") if any(hasattr(r.request, "mode") for r in running) else None)
        return step(self, *args)

    def faulty_answer(self: Any, call: Any) -> None:
        self.losing = due(f"reply to {calls.get(type(call))}")
        answer(self, call)
        self.losing = None

    def faulty_send(self: Any, message: Any) -> None:
        if not (isinstance(message, messages.Reply) and getattr(self, "losing", None)):
            send(self, message)

    Publication.begin, Publication._verify = faulty_begin, faulty_verify  # type: ignore[method-assign]
    Core.drop_caches, Core.step = faulty_drop, faulty_step  # type: ignore[method-assign]
    Service._answer, Service._send = faulty_answer, faulty_send  # type: ignore[method-assign]


def wrap_transfers() -> None:
    """Wraps the start of a read, once the connector is imported."""
    from adapters.vllm_engine.process.nixl_connector import WorkerSide

    read = WorkerSide._read_blocks

    def faulty_read(self: Any, **fields: Any) -> bool:
        happen(due("read"))
        return read(self, **fields)

    WorkerSide._read_blocks = faulty_read  # type: ignore[method-assign]


def fork_workers() -> None:
    """Workers of a tensor-parallel engine are forked: they start in a second and have the wrappers.

    vLLM spawns them on CPU; nothing in this process has run yet that a fork could break.
    """
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def main(arguments: Sequence[str] | None = None) -> None:
    from adapters.vllm_engine.process import main as process

    global _worker
    options = list(sys.argv[1:] if arguments is None else arguments)
    _worker = Path(json.loads(options[options.index("--settings") + 1])["log_path"]).stem
    fault = due("start")
    if fault == "no plugin":
        os.environ["VLLM_PLUGINS"] = "none"
    happen(fault)
    wrap_workers()
    wrap_engine()
    wrap_transfers()
    fork_workers()
    process.main(arguments)


if __name__ == "__main__":
    main()
