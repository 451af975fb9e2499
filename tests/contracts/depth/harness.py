"""Runs rollouts on real vLLM in forked child processes: one engine configuration, many policies, maybe a mutation.

Children come from a fork server that has vLLM imported, so an engine starts in seconds. A mutation replaces one
mechanism in the child; the checks in `test_depth.py` must notice each of them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapters.vllm_engine.client import forkserver
from adapters.vllm_engine.process.main import end_with_parent, environment

POLICIES = ("fixed:4", "fixed:2", "fixed:3", "fixed:1", "early:0.6:2:4", "early:0.5:1:3", "delayed:0.6:1:4")
MIXED, COIN = "mixed", "coin"
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 32},
    "cache": {"enable_prefix_caching": True},
    "wide": {"enable_prefix_caching": True, "max_num_seqs": 32},  # requests find blocks that fill in the same step
    "tiny": {"num_kv_blocks": 10, "max_num_seqs": 8},
    "all": {"max_num_batched_tokens": 32, "enable_prefix_caching": True, "num_kv_blocks": 10, "max_num_seqs": 8},
}
SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rollout and its score by trace (temperature applied)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    scores: tuple[float, ...]
    loops: tuple[int, ...]
    """The trace's values: loops of each input token, or another model's bytes, row by row."""
    temperature: float
    seed: int
    execution: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.prompt, self.seed, self.execution


@dataclass(kw_only=True)
class Outcome:
    """All rollouts of one policy under one engine, and what happened on the way."""

    rows: list[Row] = field(default_factory=list)
    preempted: int = 0
    cached_tokens: int = 0
    layer_calls: int = 0
    layer_tokens: int = 0
    first_turn: int = 0
    """How many of the rows are first turns, without the second turn's."""


def first_turn(policy: str) -> list[dict[str, Any]]:
    """20 requests: odd prompt lengths around the block size, some sharing two whole blocks, two temperatures."""
    rng = random.Random(5)
    shared = [rng.randrange(2, 256) for _ in range(64)]
    requests = []
    for i in range(20):
        prompt = [rng.randrange(2, 256) for _ in range([1, 2, 5, 31, 32, 33, 40, 64][i % 8])]
        if i % 5 == 4:
            prompt = shared + prompt[:3]
        execution = POLICIES[i % len(POLICIES)] if policy == MIXED else policy
        requests.append(
            {"prompt": prompt, "seed": 1000 + i, "temperature": (1.0, 0.7)[i % 2], "tokens": rng.randrange(8, 60)}
            | {"execution": "early:0.6:1:4" if policy == COIN else execution}
        )
    return requests


def second_turn(rows: list[Row]) -> list[dict[str, Any]]:
    """Prompts that begin with a first turn's prompt and answer: its shallow blocks must not serve them."""
    return [
        {"prompt": list(row.prompt + row.tokens)[:150], "seed": 9000 + i, "temperature": 1.0, "tokens": 12}
        | {"execution": row.execution}
        for i, row in enumerate(rows)
    ]


def rollouts(
    model: Path,
    engine: str,
    policies: tuple[str, ...],
    *,
    mutation: str | None = None,
    repeat: bool = False,
    dtype: str = "float32",
) -> dict[str, Outcome] | str:
    """Outcomes by policy, or the text of the error that stopped the child.

    Args:
        repeat: send the first turn twice, so that whole prompts are found in the prefix cache.
    """
    order = mutation, (model, engine, policies, repeat, dtype)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("order", "answer")]
        paths[0].write_bytes(pickle.dumps(order))
        with open(Path(folder) / "log", "w+b") as log:
            child = forkserver.fork(
                __name__,
                [str(path) for path in paths],
                log=log,
                environment=environment(dict(os.environ), cuda=False),
                seconds=SECONDS,
            )
            try:
                child.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"engine {engine!r} did not finish within {SECONDS} s") from None
            finally:
                child.kill()
                child.stdin.close()
            if not paths[1].exists():
                raise RuntimeError(f"engine {engine!r}: the child ended with {child.returncode}")
        return pickle.loads(paths[1].read_bytes())


def main(arguments: Sequence[str]) -> None:
    """The child: does what the order says and writes the answer."""
    end_with_parent()
    order, answer = map(Path, arguments)
    mutation, work = pickle.loads(order.read_bytes())
    try:
        if mutation:
            _mutate(mutation)
        outcome: Any = _run(*work)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    answer.write_bytes(pickle.dumps(outcome))


def _mutate(name: str) -> None:
    """Applies a mutation of this file, or one named module:function."""
    module, _, function = name.partition(":")
    (getattr(importlib.import_module(module), function) if function else MUTATIONS[name])()


def _run(model: Path, engine: str, policies: tuple[str, ...], repeat: bool, dtype: str) -> dict[str, Outcome]:
    from adapters.vllm_engine.process.core import Core
    from adapters.vllm_engine.settings import EngineSettings

    values = {
        "max_model_len": 256,
        "dtype": dtype,
        "kv_cache_bytes": 64 << 20,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }
    core = Core(EngineSettings(model=model, log_path=Path("unused"), **{**values, **ENGINES[engine]}))
    outcomes = {}
    for policy in policies:
        if policy == COIN:
            flip_coins(core)
        core.drop_caches()
        outcomes[policy] = _outcome(core, policy, repeat)
    return outcomes


def _outcome(core: Any, policy: str, repeat: bool) -> Outcome:
    outcome = Outcome()
    _count(core, outcome)
    before = core.rpc("tether_counters")[0]
    outcome.rows = _generate(core, first_turn(policy), "first")
    after = core.rpc("tether_counters")[0]
    outcome.layer_calls = after["layer_calls"] - before["layer_calls"]
    outcome.layer_tokens = after["layer_tokens"] - before["layer_tokens"]
    outcome.first_turn = len(outcome.rows)
    if repeat:
        outcome.rows += _generate(core, first_turn(policy), "again")
    outcome.rows += _generate(core, second_turn(outcome.rows[: outcome.first_turn]), "second")
    return outcome


def _count(core: Any, outcome: Outcome) -> None:
    """Counts preemptions and prefix-cache hits of this outcome."""
    scheduler = core.engine.engine_core.engine_core.scheduler
    preempt = type(scheduler)._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        outcome.preempted += 1
        return preempt(scheduler, *args, **kwargs)

    scheduler._preempt_request = counted
    client = core.engine.engine_core
    get_output = type(client).get_output

    def counted_output() -> Any:
        found = get_output(client)
        outcome.cached_tokens += sum(o.prefill_stats.num_cached_tokens for o in found.outputs if o.prefill_stats)
        return found

    client.get_output = counted_output


def _generate(core: Any, work: list[dict[str, Any]], turn: str) -> list[Row]:
    from adapters.contract import GenerationRequest, SamplingParams, ScoreRequest, Version

    requests = [
        GenerationRequest(
            request_id=f"{turn}-{i}",
            prompt_token_ids=tuple(w["prompt"]),
            sampling=SamplingParams(max_tokens=w["tokens"], temperature=w["temperature"], ignore_eos=True),
            seed=w["seed"],
            execution=w["execution"],
        )
        for i, w in enumerate(work)
    ]
    results = _drain(core, [lambda r=r: core.add(r) for r in requests], Version(0, 0))
    scores = [
        ScoreRequest(
            request_id=f"score-{r.request_id}",
            token_ids=r.prompt_token_ids + results[r.request_id].token_ids,
            num_prompt_tokens=len(r.prompt_token_ids),
            temperature=r.sampling.temperature,
            trace=results[r.request_id].trace,
        )
        for r in requests
    ]
    scored = _drain(core, [lambda s=s: core.add_score(s) for s in scores], Version(0, 0))
    return [
        Row(
            prompt=r.prompt_token_ids,
            tokens=results[r.request_id].token_ids,
            logprobs=results[r.request_id].logprobs,
            scores=scored[f"score-{r.request_id}"].logprobs,
            loops=tuple(results[r.request_id].trace.data),
            temperature=r.sampling.temperature,
            seed=r.effective_seed,
            execution=r.execution or "",
        )
        for r in requests
    ]


def _drain(core: Any, adds: list[Callable[[], None]], version: Any) -> dict[str, Any]:
    for add in adds:
        add()
    results = {}
    while core.num_running:
        results.update((r.request_id, r) for r in core.step(version))
    return results


def flip_coins(core: Any) -> None:
    """Exits by chance, never the same twice: a recomputed token can agree with its trace only by following it."""
    import torch

    model = core.engine.model_executor.driver_worker.worker.get_model().model
    model.exit_chance = lambda h: torch.rand(h.shape[0])


def _no_leave_behind() -> None:
    from providers.ouro.engine import OuroModel

    OuroModel.leave_behind = lambda *args: None  # type: ignore[method-assign]


def _prompt_by_step_size() -> None:
    """A one-token step is taken for a decode step, a longer one for a prompt."""

    def change(step: Any) -> None:
        counts = np.bincount(step.request)[step.request]
        step.recorded = np.where(counts > 1, 4, 0)

    _change_step(change)


def _trace_ignored() -> None:
    """Recomputed tokens follow the policy again instead of their record."""
    from adapters.vllm_engine.worker.records import Records

    def change(step: Any) -> None:
        prompt = step.recorded == 4
        step.recorded = np.where(prompt & (step.position < step.prompt_lengths), 4, 0)

    _change_step(change)
    original = Records.record

    def record(self: Any, slots: Any, positions: Any, values: Any) -> None:
        fresh = positions >= self.known[slots]
        original(self, slots[fresh], positions[fresh], values[fresh])

    Records.record = record  # type: ignore[method-assign]


def _change_step(change: Callable[[Any], None]) -> None:
    from adapters.vllm_engine.worker.step import Step

    original = Step.__init__

    def init(self: Any, runner: Any, *others: Any) -> None:
        original(self, runner, *others)
        self.prompt_lengths = runner.input_batch.num_prompt_tokens[: len(self.bounds) - 1][self.request]
        change(self)

    Step.__init__ = init  # type: ignore[method-assign]


def _rows_dropped_inside_a_chunk() -> None:
    """A request's active rows are attended to as if they were its last positions."""
    from adapters.vllm_engine.worker.step import Step

    original = Step._metadata

    def metadata(self: Any, rows: np.ndarray) -> Any:
        everyone = np.arange(self.size)
        counts = zip(*np.unique(self.request[rows], return_counts=True), strict=True)
        last = np.concatenate([everyone[self.request == request][-count:] for request, count in counts])
        return original(self, last)[0], self._cache_slots[self.index(rows)]

    Step._metadata = metadata  # type: ignore[method-assign]


def _cache_everything() -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    from adapters.vllm_engine.worker import patches

    setattr(KVCacheCoordinator.cache_blocks, patches._MARK, True)


def _no_rewind() -> None:
    from adapters.vllm_engine.worker import patches

    patches.rewind_discarded_draws = lambda runner: None


MUTATIONS: dict[str, Callable[[], None]] = {
    "no last-exited write": _no_leave_behind,
    "prompt recognised by step size": _prompt_by_step_size,
    "rows dropped inside a chunk": _rows_dropped_inside_a_chunk,
    "trace ignored on recomputation": _trace_ignored,
    "cache cap removed": _cache_everything,
    "generator patch removed": _no_rewind,
}
