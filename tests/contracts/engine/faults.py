"""An engine process that breaks where a test tells it to. Start it with `LocalEngine(settings, module=MODULE)`.

The product has no switch for faults. This module wraps its functions, in the engine process and (forked) its workers,
and then runs it. A test writes "step fault" into the file that TETHER_TEST_FAULT names; the first wrapper that finds
its own step there takes the file away and does what it says.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

MODULE = __name__
VARIABLE = "TETHER_TEST_FAULT"
STALL_SECONDS = 4.0
STEPS = ("begin", "stage 0", "stage last", "prepare", "commit", "verify", "cache reset", "settle")
WORKER_STEPS = ("stage 0", "stage last", "prepare", "commit", "settle")
"""Steps that run on the workers; there the last worker breaks."""
FAULTS = ("exception", "kill", "stall", "corrupt byte", "lost reply")


class Injected(RuntimeError):
    """The exception that a fault raises."""


def order(step: str, fault: str) -> None:
    """Tells the engine process where to break next."""
    path = Path(os.environ[VARIABLE])
    path.with_suffix(".new").write_text(f"{step}|{fault}")
    path.with_suffix(".new").rename(path)


def withdraw() -> bool:
    """Takes back an order. True if nothing had met it."""
    path = Path(os.environ[VARIABLE])
    met = not path.exists()
    path.unlink(missing_ok=True)
    return not met


def due(step: str) -> str | None:
    """The fault ordered for this step, once."""
    path = Path(os.environ[VARIABLE])
    try:
        ordered, _, fault = path.read_text().partition("|")
    except FileNotFoundError:
        return None
    if ordered != step:
        return None
    path.unlink()
    return fault


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


class Weights:
    """Wraps `LiveWeights`: steps on the last worker."""

    def __init__(self) -> None:
        from adapters.vllm_engine.weights import LiveWeights

        self.buckets: list[Any] = []
        for name in ("stage", "prepare", "commit", "settle"):
            setattr(LiveWeights, name, self._wrap(name, getattr(LiveWeights, name)))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        def step(live: Any, *args: Any) -> Any:
            if get_tensor_model_parallel_rank() != get_tensor_model_parallel_world_size() - 1:
                return original(live, *args)
            if name == "stage":
                self.buckets = [b for b in self.buckets if Path(b.path).exists()] + [args[0]]
            fault = due(self._label(name, args))
            if fault == "corrupt byte":
                flip_byte(self.buckets[-1].path, self.buckets[-1].placements[-1].offset + 5)
            happen(fault)
            return original(live, *args)

        return step

    def _label(self, name: str, args: tuple[Any, ...]) -> str:
        if name != "stage":
            return name
        names = {place.name for place in args[0].placements}
        return "stage 0" if "model.embed_tokens.weight" in names else "stage last" if LAST in names else "stage"


LAST = "model.layers.2.post_attention_layernorm_2.weight"


def wrap_engine() -> None:
    """Wraps what runs in the engine process: begin, verify, cache reset, replies, steps."""
    from adapters.vllm_engine import messages
    from adapters.vllm_engine.core import Core
    from adapters.vllm_engine.publication import Publication
    from adapters.vllm_engine.service import Service

    calls = {
        messages.Begin: "begin",
        messages.Stage: "stage 0",
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
        happen(due("generate"))
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


def fork_workers() -> None:
    """Workers of a tensor-parallel engine are forked: they start in a second and have the wrappers.

    vLLM spawns them on CPU; nothing in this process has run yet that a fork could break.
    """
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def main(arguments: Sequence[str] | None = None) -> None:
    from adapters.vllm_engine import process

    fault = due("start")
    if fault == "no plugin":
        os.environ["VLLM_PLUGINS"] = "none"
    happen(fault)
    Weights()
    wrap_engine()
    fork_workers()
    process.main(arguments)
