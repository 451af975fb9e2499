"""Random sequences of publish, generate, abort, refuse, kill and restart on a real engine, as a hypothesis machine.

Invariant: every response names one committed version and is what an engine started on that version's weights gives,
bitwise; an aborted one is a beginning of it.

    python -m tests.contracts.engine.sequences --count 1000

runs that many sequences and writes benchmarks/results/sequences_cpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file

from adapters.contract import EngineDead, GenerationResult, PublicationRefused, SamplingParams, Version
from adapters.vllm_engine.client.local import LocalEngine
from benchmarks import record
from tests.tiny import write_ouro

from .conftest import make_requests, next_version, run, settings_for

NAMES = ("A", "B", "C")
POOL = 8
LONG = 24
"""Tokens of a request that can be met in flight."""

choices = st.lists(st.integers(0, POOL - 1), min_size=1, max_size=4, unique=True)
names = st.sampled_from(NAMES)
Outputs = tuple[tuple[int, ...], tuple[float, ...]]


def requests(tag: str, chosen: Sequence[int], tokens: int) -> list[Any]:
    everything = make_requests(tag, POOL, sampling=SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [everything[i] for i in chosen]


class Stand:
    """The engine under test, the weights by name, and what each request of the pool gives under each of them."""

    def __init__(self, engine: LocalEngine, weights: dict[str, Any], expected: dict[str, list[Outputs]]) -> None:
        self.engine, self.weights, self.expected = engine, weights, expected
        self.committed: dict[Version, str] = {}
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.tag = 0

    def next_tag(self) -> str:
        self.tag += 1
        return f"s{self.tag}"

    def check(self, results: Sequence[GenerationResult]) -> None:
        for result in results:
            assert result.version in self.committed, f"{result.version} was never committed"
            index = int(result.request_id.rpartition("-")[2])
            tokens, logprobs = self.expected[self.committed[result.version]][index]
            count = len(result.token_ids)
            assert result.token_ids == tokens[:count] and result.logprobs == logprobs[:count], result.request_id
            assert result.error is None and result.finish_reason in ("length", "abort")
            self.counts[f"responses, {result.finish_reason}"] += 1


def remembered(step: Callable[..., None]) -> Callable[..., None]:
    """Keeps the first error of a step: a real engine's may not come again, and hypothesis then reports only that."""

    @functools.wraps(step)
    def wrapped(self: Any, **drawn: Any) -> None:
        try:
            step(self, **drawn)
        except BaseException as error:
            self.stand.error = self.stand.error or error
            raise

    return wrapped


class Sequences(RuleBasedStateMachine):
    stand: Stand

    @initialize(name=names)
    def begin(self, name: str) -> None:
        self.stand.counts["sequences"] += 1
        if self.stand.counts["sequences"] % 100 == 0:
            print(dict(self.stand.counts), flush=True)
        self.publish(name)

    def publish(self, name: str, **options: Any) -> None:
        version = next_version(self.stand.engine)
        self.stand.engine.publish(version, self.stand.weights[name], **options)
        self.stand.committed[version] = name
        self.stand.counts["publications"] += 1

    @rule(name=names)
    @remembered
    def publish_idle(self, name: str) -> None:
        self.publish(name)

    @rule(chosen=choices, tokens=st.sampled_from((1, 5, LONG)))
    @remembered
    def generate(self, chosen: list[int], tokens: int) -> None:
        self.stand.check(run(self.stand.engine, requests(self.stand.next_tag(), chosen, tokens)))

    @rule(name=names, chosen=choices, mode=st.sampled_from(("drain", "abort")))
    @remembered
    def publish_in_flight(self, name: str, chosen: list[int], mode: str) -> None:
        tag = self.stand.next_tag()
        stream = self.stand.engine.generate(requests(tag, chosen, LONG) + requests(f"{tag}x", [0], 1))
        results = [next(stream)]
        self.publish(name, in_flight=mode)
        self.stand.check([*results, *stream])

    @rule(chosen=choices, ended=choices)
    @remembered
    def abort(self, chosen: list[int], ended: list[int]) -> None:
        tag = self.stand.next_tag()
        stream = self.stand.engine.generate(requests(tag, chosen, LONG) + requests(f"{tag}x", [0], 1))
        results = [next(stream)]
        self.stand.engine.abort([f"{tag}-{i}" for i in ended])
        self.stand.check([*results, *stream])

    @rule(chosen=choices)
    @remembered
    def leave_unread(self, chosen: list[int]) -> None:
        tag = self.stand.next_tag()
        stream = self.stand.engine.generate(requests(tag, chosen, LONG) + requests(f"{tag}x", [0], 1))
        self.stand.check([next(stream)])
        stream.close()

    @rule(name=names)
    @remembered
    def refuse(self, name: str) -> None:
        bad = dict(self.stand.weights[name])
        del bad["model.norm.weight"]
        with pytest.raises(PublicationRefused):
            self.stand.engine.publish(next_version(self.stand.engine), bad)
        self.stand.counts["publications refused"] += 1

    @precondition(lambda self: not getattr(self, "killed", False))  # at most one: a restart takes seconds
    @rule(chosen=choices, chance=st.integers(0, 7))
    @remembered
    def kill(self, chosen: list[int], chance: int) -> None:
        if chance:
            return
        self.killed = True
        tag = self.stand.next_tag()
        stream = self.stand.engine.generate(requests(tag, chosen, LONG) + requests(f"{tag}x", [0], 1))
        results = [next(stream)]
        os.kill(self.stand.engine.pid, signal.SIGKILL)
        with contextlib.suppress(EngineDead):  # on a busy machine everything may have come before the kill
            results.extend(stream)
        with pytest.raises(EngineDead):
            self.stand.engine.health()
        self.stand.check(results)
        self.stand.engine.restart()
        self.stand.counts["kills"] += 1


def run_sequences(stand: Stand, *, count: int, steps: int, first: int = 0) -> None:
    """`count` sequences of `steps` steps, the same ones for the same arguments. Raises on the first violation."""
    machine = type("Machine", (Sequences,), {"stand": stand})
    options = settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # shrinking would replay an engine's life over and over
        suppress_health_check=list(HealthCheck),
    )
    seed(first)(machine)
    try:
        run_state_machine_as_test(machine, settings=options)
    except BaseException as error:
        raise (stand.error or error) from error


@contextmanager
def stand(folder: Path) -> Iterator[Stand]:
    """An engine, and references from engines started on each set of weights."""
    models = {name: write_ouro(folder / name, seed=i) for i, name in enumerate(NAMES)}
    expected = {}
    for name, model in models.items():
        with LocalEngine(settings_for(model, folder / "log")) as reference:
            results = run(reference, requests("reference", range(POOL), LONG))
            expected[name] = [(r.token_ids, r.logprobs) for r in results]
    weights = {name: load_file(model / "model.safetensors") for name, model in models.items()}
    with LocalEngine(settings_for(models["A"], folder / "log")) as engine:
        yield Stand(engine, weights, expected)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    record.commit()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, stand(Path(folder)) as stood:
        run_sequences(stood, count=arguments.count, steps=arguments.steps, first=arguments.seed)
    results = {**dict(sorted(stood.counts.items())), "violations": 0, "seconds": round(time.monotonic() - started, 1)}
    command = f"python -m tests.contracts.engine.sequences --count {arguments.count}"
    print(results, record.write("sequences_cpu", command=command, settings=vars(arguments), results=results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
