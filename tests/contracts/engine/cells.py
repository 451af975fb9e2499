"""One cell of the fault matrix: break one step of a publication in one way, and see what is served afterwards.

After every cell the outputs equal the old version's or the new one's exactly, under that version's name; or the engine
says that it is blocked. Then a good publication succeeds. `check` does this on a real engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.contract import EngineBlocked, EngineDead, EngineError, EngineTimeout, SamplingParams, Version
from adapters.hf_convert.manifest import manifest_of
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.memory import buckets, shared_memory
from adapters.vllm_engine.process import messages

from . import faults
from .conftest import drawn, make_requests, next_version, run, settings_for

Pairs = list[tuple[str, torch.Tensor]]

BUCKET_BYTES = 400_000
"""So small that the tiny models fill several."""

STEPS = ("begin", "stage first", "stage last", "prepare", "commit", "read back", "verify", "cache reset", "settle")
"""The engine's steps. On two workers, stage, prepare, commit, settle and rollback break on the second."""
ROLLBACK = "rollback"
PROCESS_FAULTS = ("exception", "kill", "stall", "stop")
"""Raise; kill -9; exceed the deadline, then go on; SIGSTOP, which only a restart ends."""
CORRUPT = ("stage first", "stage last", "prepare", "commit", "read back")
LOST = ("begin", "stage first", "prepare", "commit")
TENSOR_FAULTS: dict[str, Callable[[Pairs, int], Pairs]] = {
    "missing": lambda pairs, i: pairs[:i] + pairs[i + 1 :],
    "extra": lambda pairs, i: [*pairs, ("model.layers.9.mlp.up_proj.weight", torch.ones(1))],
    "duplicate": lambda pairs, i: [*pairs, (pairs[i][0], pairs[i][1] + 1)],
    "misshapen": lambda pairs, i: _replace(pairs, i, pairs[i][1][:-1]),
    "dtype": lambda pairs, i: _replace(pairs, i, pairs[i][1].to(torch.bfloat16)),
    "nan": lambda pairs, i: _replace(pairs, i, torch.full_like(pairs[i][1], float("nan"))),
}
TENSOR_STEPS = ("begin", "stage first", "stage last", "commit")
"""Offered as such; sent instead of what the manifest promised; sent so once all was prepared."""


def all_cells() -> list[tuple[str, str]]:
    """(step, fault) of the whole matrix, step by step; what a fault cannot meet is left out."""
    process = [(s, f) for s in (*STEPS, ROLLBACK) for f in PROCESS_FAULTS if s != "read back"]
    cells = [
        *process,
        *((step, "corrupt byte") for step in CORRUPT),
        *((step, "lost reply") for step in LOST),
        *((step, fault) for step in TENSOR_STEPS for fault in TENSOR_FAULTS),
    ]
    return sorted(cells, key=lambda cell: (*STEPS, ROLLBACK).index(cell[0]))


def _replace(pairs: Pairs, i: int, tensor: torch.Tensor) -> Pairs:
    return [*pairs[:i], (pairs[i][0], tensor), *pairs[i + 1 :]]


@dataclass(kw_only=True)
class Bench:
    """An engine with faults to order, two sets of weights, and what each of them gives.

    `expected` comes from engines that were started on the weights, never published to.
    """

    engine: Any
    weights: dict[str, Pairs]
    expected: dict[str, list[Any]]
    serves: str = "A"
    count: int = field(default=0)

    def outputs(self) -> tuple[list[Any], set[Version]]:
        self.count += 1
        results = run(self.engine, requests(f"cell-{self.count}"))
        return drawn(results), {r.version for r in results}

    def good_publication(self, version: Version) -> None:
        self.engine.publish(version, iter(self.weights["B" if self.serves == "A" else "A"]))
        self.serves = "B" if self.serves == "A" else "A"


def requests(tag: str) -> list[Any]:
    return make_requests(tag, 4, sampling=SamplingParams(max_tokens=6, ignore_eos=True))


@contextlib.contextmanager
def bench(models: dict[str, Path], folder: Path, *, tensor_parallel: int = 1) -> Iterator[Bench]:
    """An engine serving models["A"], with buckets small enough that there are several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, str(folder / "fault"))
        patch.setattr(buckets, "BUCKET_BYTES", BUCKET_BYTES)
        expected = {}

        def start(name: str) -> LocalEngine:
            settings = settings_for(models[name], folder / "log", tensor_parallel=tensor_parallel)
            return LocalEngine(settings, module=faults.MODULE)

        with start("B") as reference:
            expected["B"] = drawn(run(reference, requests("reference")))
        with start("A") as engine:
            expected["A"] = drawn(run(engine, requests("reference")))
            assert all(a != b for a, b in zip(expected["A"], expected["B"], strict=True))
            weights = {name: list(load_file(path / "model.safetensors").items()) for name, path in models.items()}
            yield Bench(engine=engine, weights=weights, expected=expected)


def check(bench: Bench, step: str, fault: str) -> dict[str, Any]:
    """Runs one cell. Raises AssertionError if anything but the old or the new version is served."""
    engine, old = bench.engine, bench.serves
    new = "B" if old == "A" else "A"
    version, old_version = next_version(engine), engine.weight_version()
    started = time.monotonic()
    with impatience(engine):
        error = attempt(bench, version, step, fault)
    seconds = time.monotonic() - started
    assert not (left := faults.withdraw()), f"the fault was never met: {left}"
    restarted = recover(engine, by_force=fault == "stop" or error == "EngineDead")
    if engine.health().state == "blocked":
        with pytest.raises(EngineBlocked):
            bench.outputs()
        serves = "nothing"
    else:
        outputs, versions = bench.outputs()
        serves = {old_version: "old", version: "new"}[versions.pop()]
        assert outputs == bench.expected[old if serves == "old" else new], f"{step} x {fault}: outputs of neither"
    assert (serves == "nothing") == ((step, fault) == (ROLLBACK, "exception")), f"{step} x {fault}: serves {serves}"
    bench.good_publication(version)  # also when it is served already: a retry after a lost reply
    outputs, versions = bench.outputs()
    assert versions == {version} and outputs == bench.expected[new]
    return {
        "step": step,
        "fault": fault,
        "error": error,
        "serves": serves,
        "restarted": restarted,
        "seconds": round(seconds, 2),
    }


@contextlib.contextmanager
def impatience(engine: Any) -> Iterator[None]:
    """Deadlines shorter than a stall, for the publication that meets one; what follows may take its time."""
    connection = engine._connection
    connection.settings = dataclasses.replace(
        engine.settings, deadline_seconds=faults.STALL_SECONDS - 1, heartbeat_seconds=faults.STALL_SECONDS + 1
    )
    try:
        yield
    finally:
        connection.settings = engine.settings


def attempt(bench: Bench, version: Version, step: str, fault: str) -> str:
    """One publication of the other weights with the fault in it -> the name of the error that it ends with."""
    pairs = bench.weights["B" if bench.serves == "A" else "A"]
    lines = [(f"reply to {step}" if fault == "lost reply" else step, fault)]
    if step == ROLLBACK:
        lines.insert(0, ("verify", "exception"))
    index = 0 if step == "stage first" else len(pairs) - 1
    try:
        if fault not in TENSOR_FAULTS:
            faults.order(*lines)
            bench.engine.publish(version, iter(pairs))
        elif step == "begin":
            bench.engine.publish(version, TENSOR_FAULTS[fault](pairs, index))
        else:
            send_otherwise(bench.engine, version, pairs, TENSOR_FAULTS[fault](pairs, index), again=step == "commit")
    except EngineError as error:
        return type(error).__name__
    raise AssertionError(f"{step} x {fault}: the publication succeeded")


def send_otherwise(engine: Any, version: Version, promised: Pairs, sent: Pairs, *, again: bool) -> None:
    """A manifest of some tensors, and then buckets of others; or (`again`) those too, once the right ones are ready."""
    call, manifest = engine._connection.call, manifest_of(promised)
    store = shared_memory.SharedFileStore()
    given = (("good", promised), ("bad", sent))
    written = {name: [bucket for bucket, _ in store.write(pairs)] for name, pairs in given}
    try:
        call(messages.Begin, bool, version=version, manifest=manifest)
        for bucket in written["good"] if again else []:
            call(messages.Stage, bucket=bucket)
        if again:
            call(messages.Prepare)
        for bucket in written["bad"]:
            call(messages.Stage, bucket=bucket)
        if not again:
            call(messages.Prepare)
        call(messages.Commit, in_flight="drain")
    finally:
        store.close()


def recover(engine: Any, *, by_force: bool) -> bool:
    """Brings the engine to where it answers: by waiting, or by a restart. True if it was restarted."""
    deadline = time.monotonic() + 30
    while not by_force:
        try:
            engine.health()
            return False
        except EngineTimeout:
            assert time.monotonic() < deadline
        except EngineDead:
            break
    engine.restart()
    return True


def cell_id(cell: tuple[str, str]) -> str:
    return "-".join(cell).replace(" ", "_")


def environment_is_clean() -> None:
    """No file of this process's engines beyond the served version's buckets."""
    from adapters.vllm_engine.memory.leftovers import memory_directory

    left = list(memory_directory().glob(f"tether-weights-{os.getpid()}-*"))
    assert not left, left
