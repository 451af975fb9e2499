"""One cell of the matrix of lost workers: kill or stop one worker in one phase, and see what becomes of the work.

Generation and scores either come out as if nothing had happened, because another worker did them, or end as an error in
bounded time; after `restart` they come out right. A publication leaves the old version or the new one on all workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from adapters.contract import (
    EngineBlocked,
    EngineDead,
    EngineError,
    EngineTimeout,
    SamplingParams,
    ScoreRequest,
    Version,
    sample_requests,
)
from adapters.vllm_engine.disaggregated.fleet import Worker
from adapters.vllm_engine.disaggregated.router import Router

from . import faults
from .conftest import drawn, make_requests, next_version, run, start_engine

DEADLINE, HEARTBEAT = 6.0, 2.0
SLACK = 14.0
"""Seconds that ending a process and its workers may take beyond the deadline, on a machine that does other things."""

GENERATION = {
    "prefill": ("prefill0", "generate"),
    "read": ("decode0", "read"),
    "decode": ("decode0", "decode"),
    "score": ("decode0", "score"),
}
"""Phase -> the worker that is in it, and the step of `faults` where it breaks."""
FROM_OUTSIDE = (
    "handed over, prefill0",
    "handed over, decode0",
    "decoding, prefill0",
    "idle, prefill0",
    "idle, decode0",
)
"""When a prompt has been computed and nobody reads it yet; when it has been read; between two calls."""
PUBLICATION = ("begin", "stage first", "prepare", "commit", "settle")
LOSSES = ("kill", "stop")


def all_cells(kind: str, *, short: bool = False) -> list[tuple[str, str]]:
    """(phase, fault) for an engine such as "1P2D"; publications break on the last worker of each role.

    Args:
        short: only kills in publications, where a stop and an exception do what they do with one worker of each role.
    """
    last = [f"{role}{int(kind[i]) - 1}" for role, i in (("prefill", 0), ("decode", 2))]
    cells = [(phase, fault) for phase in (*GENERATION, *FROM_OUTSIDE) for fault in LOSSES]
    faults = ("kill",) if short else (*LOSSES, "exception")
    publication = [(f"{step}, {worker}", fault) for worker in last for step in PUBLICATION for fault in faults]
    return cells + [cell for cell in publication if not (cell[0].startswith("settle") and cell[1] == "exception")]


@dataclass(kw_only=True)
class Stand:
    """An engine with faults to order, two sets of weights, and what each gives on engines started on them.

    Attributes:
        local: a local engine that was started on weights "A".
    """

    kind: str
    engine: Any
    local: Any
    weights: dict[str, Any]
    expected: dict[str, list[Any]]
    serves: str = "A"
    count: int = 0

    @property
    def other(self) -> str:
        return "B" if self.serves == "A" else "A"

    def requests(self) -> list[Any]:
        self.count += 1
        return work(f"cell-{self.count}")

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.engine.workers if worker.settings.log_path.stem == name)


def work(tag: str) -> list[Any]:
    """Two prompts alone, and one with four samples."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    alone = make_requests(tag, 7, sampling=sampling)[3:]
    return [*alone, *sample_requests(make_requests(f"{tag}-many", 8, sampling=sampling)[7], 4)]


@contextlib.contextmanager
def stand(kind: str, models: dict[str, Path], folder: Path) -> Iterator[Stand]:
    """An engine serving models["A"], and references from local engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, str(folder / "fault"))
        with start_engine("local", models["B"], folder) as reference:
            expected = {"B": drawn(run(reference, work("reference")))}
        weights = {name: load_file(model / "model.safetensors") for name, model in models.items()}
        patience = {"deadline_seconds": DEADLINE, "heartbeat_seconds": HEARTBEAT}
        with (
            start_engine("local", models["A"], folder) as local,
            start_engine(kind, models["A"], folder, module=faults.MODULE, **patience) as engine,
        ):
            expected["A"] = drawn(run(local, work("reference")))
            engine.publish(Version(1, 1), weights["A"])
            yield Stand(kind=kind, engine=engine, local=local, weights=weights, expected=expected)


def check(stood: Stand, phase: str, fault: str) -> dict[str, Any]:
    """Runs one cell. Raises AssertionError if results are wrong, or nothing happens within the deadlines."""
    publishing = phase.partition(",")[0] in PUBLICATION
    started = time.monotonic()
    ended, serves = (_publication if publishing else _generation)(stood, phase, fault)
    seconds = time.monotonic() - started
    calls = 3 if publishing else 1  # the call that breaks, the way out of doubt, and the question how it is
    assert seconds < calls * (DEADLINE + SLACK), f"{phase} x {fault} took {seconds:.0f} s"
    assert not (left := faults.withdraw()), f"the fault was never met: {left}"
    lost = [worker.settings.log_path.stem for worker in stood.engine.workers if not worker.usable]
    if lost or ended not in ("recovered", "PublicationRefused", "PublicationFailed"):
        stood.engine.restart()
    results = run(stood.engine, stood.requests())
    assert drawn(results) == stood.expected[stood.serves] and {r.version for r in results} == {
        stood.engine.weight_version()
    }
    health = stood.engine.health()
    assert health.state == "serving" and {w.version for w in health.workers} == {health.version}, health
    return {
        "engine": stood.kind,
        "phase": phase,
        "fault": fault,
        "ended": ended,
        "serves": serves,
        "lost": lost,
        "seconds": round(seconds, 2),
    }


def _generation(stood: Stand, phase: str, fault: str) -> tuple[str, str]:
    requests = stood.requests()
    expected = stood.expected[stood.serves]
    with from_outside(stood, phase, fault):
        if phase in GENERATION:
            worker, step = GENERATION[phase]
            if phase != "score":
                faults.order((f"{worker}:{step}", fault))
        try:
            if phase == "score":
                results = run(stood.engine, requests)
                faults.order((f"{worker}:{step}", fault))
                scores = stood.engine.score([score(*pair) for pair in zip(requests, results, strict=True)])
                assert [s.logprobs for s in scores] == [r.logprobs for r in results]
            else:
                assert drawn(run(stood.engine, requests)) == expected
        except (EngineDead, EngineTimeout) as error:
            return type(error).__name__, "nothing until restart"
    return "recovered", "old"


def score(request: Any, result: Any) -> ScoreRequest:
    return ScoreRequest(
        request_id=f"score-{request.request_id}",
        token_ids=request.prompt_token_ids + result.token_ids,
        num_prompt_tokens=len(request.prompt_token_ids),
        trace=result.trace,
    )


@contextlib.contextmanager
def from_outside(stood: Stand, phase: str, fault: str) -> Iterator[None]:
    """Sends the signal from here, when the router has come to the phase."""
    when, _, name = phase.partition(", ")
    method: str | None = {"handed over": "_prefilled", "decoding": "_arrived"}.get(when)
    sent: list[int] = []

    def send() -> None:
        if not sent:
            sent.append(pid := stood.worker(name).connection.pid)
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            time.sleep(0.1)

    if when == "idle":
        send()
    if method is None:
        yield
        return
    original: Callable[..., None] = getattr(Router, method)

    def hooked(self: Any, *args: Any) -> None:
        send()
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, method, hooked)
        yield
    assert sent, f"{phase} was never reached"


def _publication(stood: Stand, phase: str, fault: str) -> tuple[str, str]:
    step, _, worker = phase.partition(", ")
    engine, old, version = stood.engine, stood.engine.weight_version(), next_version(stood.engine)
    faults.order((f"{worker}:{step}", fault))
    try:
        engine.publish(version, stood.weights[stood.other])
    except EngineError as error:
        ended = type(error).__name__
    else:
        raise AssertionError(f"{phase} x {fault}: the publication succeeded")
    try:
        health = engine.health()
        results = run(engine, stood.requests()) if health.state == "serving" else []
    except (EngineDead, EngineTimeout, EngineBlocked):
        results = []
    serves = "nothing until restart"
    if results:
        versions = {r.version for r in results}
        assert len(versions) == 1 and versions <= {old, version}
        serves = "old" if versions == {old} else "new"
        assert drawn(results) == stood.expected[stood.serves if serves == "old" else stood.other]
    engine.restart()
    assert engine.weight_version() in ({old, version} if serves == "new" else {old})
    engine.publish(version, stood.weights[stood.other])
    stood.serves = stood.other
    return ended, serves


def cell_id(cell: tuple[str, str]) -> str:
    return "-".join(cell).replace(" ", "_").replace(",", "")
