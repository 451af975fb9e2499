"""The engine of Tether in `benchmarks.rollout`: started as a run starts it, or in this process to be profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adapters.contract import GenerationRequest, SamplingParams, Trace, Version, derive_seed
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import measure
from benchmarks.rollout_cases import PROFILE, PROMPT, RESPONSE, Case, prompts
from benchmarks.rollout_limits import cache_bytes

Run = Callable[[str, int, int, int], float]
"""(policy, requests, tokens, repeat) -> mean loops of a generated token."""
STEPS = 4
"""Decode steps that are profiled together."""


def settings_of(model: Path, engine: str, most: int) -> EngineSettings:
    return EngineSettings(
        model=model,
        log_path=model / f"{engine}.log",
        max_model_len=PROMPT + RESPONSE,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        kv_cache_bytes=cache_bytes(model, most),
        enable_prefix_caching=False,
        enforce_eager=engine == "eager",
        async_scheduling=engine != "synchronous",
    )


def requests_of(model: Path, policy: str, count: int, response: int, repeat: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{policy}-{response}-{repeat}-{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=response, ignore_eos=True),
            seed=derive_seed(repeat, i),
            execution=policy,
        )
        for i, prompt in enumerate(prompts(model, count))
    ]


def start_ours(model: Path, engine: str, most: int) -> tuple[Run, Callable[[], None]]:
    """How to run a batch, and how to end the engine."""
    from adapters.vllm_engine.client.local import LocalEngine

    running = LocalEngine(settings_of(model, engine, most))

    def run(policy: str, count: int, response: int, repeat: int) -> float:
        requests = requests_of(model, policy, count, response, repeat)
        depths: list[int] = []
        for result in running.generate(requests):
            if result.error or len(result.token_ids) != response:
                raise RuntimeError(f"{result.request_id}: got {result.error or len(result.token_ids)}")
            depths += depths_of(result.request_id, result.trace, response)
        return sum(depths) / max(1, len(depths))

    return run, running.close


def depths_of(request_id: str, trace: Trace | None, response: int) -> list[int]:
    """Loops of each generated token that was an input; of recorded experts, 1 for each.

    Raises:
        RuntimeError: the trace is missing, or has not a row for every input token.
    """
    if trace is None or trace.shape[0] != PROMPT + response - 1:
        raise RuntimeError(f"{request_id}: got a trace {trace and trace.shape}, expected {PROMPT + response - 1} rows")
    return list(trace.data[PROMPT:]) if len(trace.shape) == 1 else [1] * (response - 1)


def profile(model: Path, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Decode steps of an engine in this process: by the clock, under the profiler of kernels, and under Python's."""
    from adapters.vllm_engine.process.core import Core

    core, version = Core(settings_of(model, PROFILE, max(case[1] for case in cases))), Version(0, 0)

    def steps() -> None:
        for _ in range(STEPS):
            core.step(version)

    for policy, count, response in cases:
        for request in requests_of(model, policy, count, response, 0):
            core.add(request)
        for _ in range(response // 2):
            core.step(version)
        step_ms = 1e3 / STEPS * measure.seconds(steps, repeats=3)["median"]
        kernels, host = measure.top_kernels(steps), measure.top_functions(steps)
        yield {"policy": policy, "requests": count, "steps": STEPS, "ms_per_step": step_ms, **kernels, "host": host}
        core.abort_all(version)
    core.close()
