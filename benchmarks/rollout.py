"""Tokens per second of rollouts at Ouro-1.4B's shape: by depth, batch size, with CUDA graphs and without.

    python -m benchmarks.rollout [--tiny] [--commit ID]

Random weights, prompts of 128 tokens, responses of 256 (`ignore_eos`, seeded, temperature 1). Engines, one after the
other in this run: ours with graphs, ours eager, ours with graphs but no step prepared ahead, and the peer: the same
layers in vLLM at full depth without trace, policy or worker code, as one graph of vLLM's own. Beside each figure the
limit: the bytes that a step must read (every layer's weights once a loop, the head, the keys and values of each loop)
over the bandwidth of a copy measured in the same run, and for the prompts their products over the rate of a large one.
What holds a step back is seen by torch's profiler over some decode steps of an engine in this process: kernels by time,
and how long the device waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.contract import GenerationRequest, SamplingParams, Version, derive_seed
from adapters.vllm_engine.process.main import environment
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import limits, measure, record
from benchmarks.shapes import write_model

PROMPT, RESPONSE = 128, 256
EARLY = "early:0.8:2:4"
"""Random weights leave at every depth from 2 to 4 with it; real ones have thresholds of their own."""
Case = tuple[str, int, int]
"""Policy, requests, tokens of each response."""
CASES: dict[str, list[Case]] = {
    "graphs": [
        *((policy, 256, RESPONSE) for policy in ("fixed:4", "fixed:3", "fixed:2", EARLY)),
        *((policy, batch, RESPONSE) for batch in (128, 32, 8, 1) for policy in ("fixed:4", EARLY)),
    ],
    "eager": [
        *((policy, 256, 32) for policy in ("fixed:4", "fixed:2", EARLY)),
        ("fixed:4", 1, 32),
    ],
    "synchronous": [("fixed:4", 256, 128), ("fixed:4", 1, 128)],
    "peer": [("full", batch, RESPONSE) for batch in (256, 128, 32, 8, 1)],
}
PROFILE = "profile"
PROFILED: list[Case] = [("fixed:4", 256, RESPONSE), (EARLY, 256, RESPONSE), ("fixed:4", 1, RESPONSE)]
TINY_CASES: dict[str, list[Case]] = {
    "graphs": [("fixed:4", 8, 8), (EARLY, 8, 8)],
    "eager": [("fixed:2", 8, 8)],
    "synchronous": [("fixed:2", 8, 8)],
    "peer": [("full", 8, 8)],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a small model, a few tokens, no record: does it run?")
    parser.add_argument("--commit", help="of a working tree without git, as on a lent machine")
    parser.add_argument("--engines", nargs="+", choices=[*CASES, PROFILE], default=[*CASES, PROFILE])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", nargs=3, metavar=("ENGINE", "MODEL", "ANSWER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        engine, model, answer = arguments.child
        found: dict[str, Any]
        if engine == PROFILE:
            found = profile(Path(model), [(p, 4, 64) for p, *_ in PROFILED] if arguments.tiny else PROFILED)
        else:
            cases = (TINY_CASES if arguments.tiny else CASES)[engine]
            found = timed(engine, Path(model), cases, arguments.repeats)
        Path(answer).write_text(json.dumps(found))
        return 0
    commit = None if arguments.tiny else arguments.commit or record.commit()
    results: dict[str, Any] = {"machine": limits.measure(), "rows": [], "profiled_steps": [], "start_seconds": {}}
    failed = []
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", "tiny-ouro" if arguments.tiny else "ouro-1.4b")
        for engine in arguments.engines:
            try:
                add(results, engine, run_child(engine, model, arguments), model)
            except subprocess.CalledProcessError as error:
                failed.append(f"{engine}: status {error.returncode}")
            if commit:  # after every engine: what was measured stays if a later one fails
                record.write(
                    "rollout_cuda",
                    command=f"python -m benchmarks.rollout --engines {' '.join(arguments.engines)}",
                    settings={"prompt": PROMPT, "repeats": arguments.repeats, "warm_up": "a short run of each case"},
                    results={**results, "failed": failed},
                    commit_id=commit,
                )
    print(f"failed: {failed or 'none'}")
    return int(bool(failed))


def add(results: dict[str, Any], engine: str, got: dict[str, Any], model: Path) -> None:
    """Puts what one engine measured into the results, each figure beside its limit."""
    if engine == PROFILE:
        results["profiled_steps"] = got["steps"]
        return
    results["start_seconds"][engine] = got["start_seconds"]
    shape = json.loads((model / "config.json").read_text())
    for row in got["rows"]:
        row["limit_tokens_per_second"] = limit(row, shape, results["machine"])
        results["rows"].append(row)
        speed = statistics.median(row["tokens_per_second"])
        case = f"{row['policy']:14s} {row['requests']:4d} x {row['response']}"
        print(f"{engine:11s} {case}: {speed:9.1f} tokens/s", flush=True)


def run_child(engine: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine in a process of its own, which its processes end with."""
    answer = model.with_name(f"{engine}.json")
    command = [sys.executable, "-m", "benchmarks.rollout", *(["--tiny"] if arguments.tiny else [])]
    command += ["--repeats", str(arguments.repeats), "--child", engine, str(model), str(answer)]
    cuda = torch.cuda.device_count() > 0
    subprocess.run(command, check=True, env=environment(dict(os.environ), cuda=cuda))
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def timed(engine: str, model: Path, cases: list[Case], repeats: int) -> dict[str, Any]:
    """One engine's cases, each once to warm up and then `repeats` times."""
    started = time.perf_counter()
    run, close = (start_peer if engine == "peer" else start_ours)(model, engine, max(case[1] for case in cases))
    seconds = time.perf_counter() - started
    rows = []
    try:
        for policy, count, response in cases:
            run(policy, count, min(response, 32), 0)
            speeds, depth = [], 0.0
            for repeat in range(1, repeats + 1):
                started = time.perf_counter()
                depth = run(policy, count, response, repeat)
                speeds.append(count * response / (time.perf_counter() - started))
            rows.append(
                {"engine": engine, "policy": policy, "requests": count, "response": response, "depth_mean": depth}
                | {"tokens_per_second": speeds}
            )
    finally:
        close()
    return {"rows": rows, "start_seconds": seconds}


Run = Callable[[str, int, int, int], float]
"""(policy, requests, tokens, repeat) -> mean loops of a generated token."""


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
    from adapters.vllm_engine.client.local import LocalEngine

    running = LocalEngine(settings_of(model, engine, most))

    def run(policy: str, count: int, response: int, repeat: int) -> float:
        requests = requests_of(model, policy, count, response, repeat)
        depths: list[int] = []
        for result in running.generate(requests):
            if result.error or len(result.token_ids) != response:
                raise RuntimeError(f"{result.request_id}: got {result.error or len(result.token_ids)}")
            depths += result.trace.data[PROMPT:]  # type: ignore[union-attr]
        return sum(depths) / max(1, len(depths))

    return run, running.close


def start_peer(model: Path, engine: str, most: int) -> tuple[Run, Callable[[], None]]:
    """vLLM as it is, with our layers: its own graph around a whole forward, nothing else of ours."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from adapters.vllm_engine.process.core import capture_sizes
    from adapters.vllm_engine.worker import patches
    from providers.ouro import engine_layers

    setattr(GPUModelRunner.load_model, patches._MARK, True)
    engine_layers.is_replayable = lambda: False
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": capture_sizes(most)}
    options = {"compilation_config": graphs} if torch.cuda.is_available() else {"enforce_eager": True}
    vllm = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            max_model_len=PROMPT + RESPONSE,
            max_num_seqs=most,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=cache_bytes(model, most),
            gpu_memory_utilization=0.01,
            block_size=32,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **options,
        )
    )

    def run(policy: str, count: int, response: int, repeat: int) -> float:
        for i, prompt in enumerate(prompts(model, count)):
            params = VllmSamplingParams(
                max_tokens=response, ignore_eos=True, logprobs=0, seed=derive_seed(repeat, i) % 2**63, detokenize=False
            )
            vllm.add_request(f"{response}-{repeat}-{i}", {"prompt_token_ids": list(prompt)}, params)
        while vllm.has_unfinished_requests():
            vllm.step()
        return 4.0

    return run, vllm.engine_core.shutdown


def profile(model: Path, cases: list[Case]) -> dict[str, Any]:
    """Decode steps of an engine in this process, once timed by the clock and once under the profiler."""
    from adapters.vllm_engine.process.core import Core

    core, version = Core(settings_of(model, PROFILE, max(case[1] for case in cases))), Version(0, 0)
    found = []
    for policy, count, response in cases:
        for request in requests_of(model, policy, count, response, 0):
            core.add(request)
        for _ in range(response // 2):
            core.step(version)
        step_ms = 1e3 / STEPS * measure.seconds(lambda: steps(core), repeats=3)["median"]
        kernels = measure.top_kernels(lambda: steps(core))
        found.append({"policy": policy, "requests": count, "steps": STEPS, "ms_per_step": step_ms, **kernels})
        core.abort_all(version)
    core.close()
    return {"steps": found}


STEPS = 4


def steps(core: Any) -> None:
    for _ in range(STEPS):
        core.step(Version(0, 0))


def prompts(model: Path, count: int) -> Iterator[tuple[int, ...]]:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(4, vocabulary, (count, PROMPT), generator=generator)
    return (tuple(row) for row in tokens.tolist())


def cache_bytes(model: Path, most: int) -> int:
    config = json.loads((model / "config.json").read_text())
    tokens = most * (PROMPT + RESPONSE + 32)
    return tokens * _token_bytes(config) * config["total_ut_steps"]


def _token_bytes(config: dict[str, Any]) -> int:
    """Keys and values of one token in one loop."""
    size = 2 if config.get("torch_dtype", config.get("dtype")) == "bfloat16" else 4
    return 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"] * size


def limit(row: dict[str, Any], config: dict[str, Any], machine: dict[str, float]) -> float:
    """Tokens per second if nothing but the needed bytes were moved, and the prompts' products made at full rate."""
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    body = layers * (2 * hidden * (heads + kv_heads) + 3 * hidden * wide)
    head = config["vocab_size"] * hidden
    size = _token_bytes(config) // (2 * kv_heads * layers)
    loops, count, response = row["depth_mean"], row["requests"], row["response"]
    weights = (loops * body + head) * size * response
    cache = count * response * (PROMPT + response / 2) * _token_bytes(config) * loops
    prefill = 2 * (config["total_ut_steps"] * body * PROMPT + head) * count
    seconds = (weights + cache) / machine["bytes_per_second"] + prefill / machine["flops_per_second"]
    return count * response / seconds


if __name__ == "__main__":
    sys.exit(main())
