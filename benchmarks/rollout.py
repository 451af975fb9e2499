"""Tokens per second of rollouts at a published shape: by depth, batch size, with CUDA graphs and without.

    python -m benchmarks.rollout [--model ouro-1.4b|olmoe-1b-7b] [--tiny] [--engines ...] [--commit ID]

Random weights, prompts of 128 tokens, responses of 256 or 128 (`ignore_eos`, seeded, temperature 1). Engines, one after
the other in this run: ours with graphs, the peer (`rollout_peer`: vLLM without trace, policy or worker code, as one
graph of its own), ours eager, ours with graphs but no step prepared ahead. Beside each figure the limit
(`rollout_limits`): the bytes that a step must read over the bandwidth of a copy measured in the same run, and for the
prompts their products over the rate of a large one. What holds a step back is seen by torch's profiler over some decode
steps of an engine in this process: kernels by time, and how long the device waits.

The record is written after every case, so that what was measured stays if the run is cut off.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.vllm_engine.process.main import end_with_parent, environment
from benchmarks import limits, record, rollout_peer
from benchmarks.rollout_cases import CASES, DEFAULT, PROFILE, PROMPT, TINY, WARM_UP, Case, cases_of, config_of
from benchmarks.rollout_engines import profile, start_ours
from benchmarks.rollout_limits import experts_read, limit
from benchmarks.shapes import write_model

NAMES = {"ouro-1.4b": "rollout_cuda", "olmoe-1b-7b": "rollout_olmoe_cuda"}
"""JSON of each model."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.child:
        return child(arguments)
    engines = arguments.engines or DEFAULT[arguments.model]
    recording = record.Recording(
        NAMES[arguments.model],
        command=f"python -m benchmarks.rollout --model {arguments.model} --engines {' '.join(engines)}",
        settings={"prompt": PROMPT, "repeats": arguments.repeats, "warm_up_tokens": WARM_UP},
        commit_id=arguments.commit,
        is_kept=not arguments.tiny,
    )
    failed: list[str] = []
    recording.save(machine=limits.measure(), rows=[], profiled_steps=[], start_seconds={}, failed=failed)
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", TINY[arguments.model] if arguments.tiny else arguments.model)
        for engine in engines:
            try:
                for found in run_child(engine, model, arguments):
                    add(recording.results, engine, found, model)
                    recording.save()
            except subprocess.CalledProcessError as error:
                failed.append(f"{engine}: status {error.returncode}")
                recording.save()
    print(f"failed: {failed or 'none'}", flush=True)
    if not failed:
        recording.finish()
    return int(bool(failed))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CASES), default="ouro-1.4b")
    parser.add_argument("--tiny", action="store_true", help="a small model, a few tokens, no record: does it run?")
    parser.add_argument("--commit", help="of a working tree without git")
    parser.add_argument("--engines", nargs="+", choices=list(CASES["ouro-1.4b"]), help="in this order")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", nargs=3, metavar=("ENGINE", "MODEL", "ANSWER"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def add(results: dict[str, Any], engine: str, found: dict[str, Any], model: Path) -> None:
    """Puts what an engine measured into the results, a figure beside its limit, and prints it."""
    taken = f"{found.pop('seconds'):6.1f} s"
    if "start" in found:
        results["start_seconds"][engine] = found["start"]
        print(f"{engine:11s} started{taken:>56s}", flush=True)
    elif "ms_per_step" in found:
        results["profiled_steps"].append(found)
        case = f"{found['policy']:14s} {found['requests']:4d}"
        print(f"{engine:11s} {case}: {found['ms_per_step']:9.2f} ms a step {taken}", flush=True)
    else:
        config = config_of(model)
        found |= {"engine": engine, "experts_read": experts_read(config, found["requests"])}
        found["limit_tokens_per_second"] = limit(found, config, results["machine"])
        results["rows"].append(found)
        speed = statistics.median(found["tokens_per_second"])
        case = f"{found['policy']:14s} {found['requests']:4d} x {found['response']:3d}"
        print(f"{engine:11s} {case}: {speed:9.1f} tokens/s {taken}", flush=True)


def run_child(engine: str, model: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One engine in a process of its own, which its processes end with: what it measured, as it comes.

    Raises:
        subprocess.CalledProcessError: it failed; what it measured before has been yielded.
    """
    answer = model.with_name(f"{engine}.jsonl")
    answer.touch()
    command = [sys.executable, "-m", "benchmarks.rollout", "--model", arguments.model]
    command += ["--repeats", str(arguments.repeats), *(["--tiny"] if arguments.tiny else [])]
    command += ["--child", engine, str(model), str(answer)]
    own = environment(dict(os.environ), cuda=torch.cuda.device_count() > 0)
    if engine == "peer":
        own |= rollout_peer.environment(arguments.model)
    with subprocess.Popen(command, env=own, stdin=subprocess.PIPE) as process, answer.open() as lines:
        ended = False
        while not ended:
            ended = process.poll() is not None
            for line in lines:
                yield json.loads(line)
            time.sleep(0.0 if ended else 0.1)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def child(arguments: argparse.Namespace) -> int:
    """Measures one engine; each finding becomes a line of the answer's file, with the seconds since the one before."""
    end_with_parent()
    engine, model, answer = arguments.child[0], Path(arguments.child[1]), Path(arguments.child[2])
    cases = cases_of(arguments.model, engine, tiny=arguments.tiny)
    if engine == PROFILE:
        findings = profile(model, cases)
    else:
        findings = timed(engine, model, cases, arguments)
    begun = time.perf_counter()
    for found in findings:
        now = time.perf_counter()
        line = json.dumps({**found, "seconds": round(now - begun, 2)}) + "\n"
        with answer.open("a") as file:
            file.write(line)
        begun = now
    return 0


def timed(engine: str, model: Path, cases: list[Case], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One engine's start, and its cases, each once to warm up and then as often as asked."""
    started, most = time.perf_counter(), max(case[1] for case in cases)
    if engine == "peer":
        run, close = rollout_peer.start_peer(model, arguments.model, most)
    else:
        run, close = start_ours(model, engine, most)
    yield {"start": time.perf_counter() - started}
    try:
        for number, (policy, count, response) in enumerate(cases):
            run(policy, count, min(response, WARM_UP[number > 0]), 0)
            speeds, depth = [], 0.0
            for repeat in range(1, arguments.repeats + 1):
                begun = time.perf_counter()
                depth = run(policy, count, response, repeat)
                speeds.append(count * response / (time.perf_counter() - begun))
            row = {"policy": policy, "requests": count, "response": response, "depth_mean": depth}
            yield {**row, "tokens_per_second": speeds}
    finally:
        close()


if __name__ == "__main__":
    sys.exit(main())
