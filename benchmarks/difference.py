"""Why bf16 scores of trainer and engine differ: one cause at a time, at Ouro-1.4B's shape on the same sequences.

    python -m benchmarks.difference [--shape ouro-1.4b] [--requests 16] [--tokens 64] [--commit ID]

An engine makes rollouts at two, three and four loops and by early exit, and scores them again by their trace. Then the
training model, without optimizer, scores them as it is, in fp32, and in bf16 with one thing changed at a time
(`difference_variants`). For each of those: how far it is from the trainer as it is (what the thing does by itself,
after one layer of one loop and in the scores), from the engine (what remains when it is made equal), and from fp32.
Random weights. The record is written after each. Last, single operations of both sides on the same inputs
(`difference_operations`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.contract import GenerationRequest, SamplingParams, ScoreRequest, derive_seed
from adapters.hf_convert.directory import HFDirectory
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import difference_operations, record, yardstick
from benchmarks import difference_variants as variants
from benchmarks.shapes import SHAPES, config_of, write_model

POLICIES = ("fixed:2", "fixed:3", "fixed:4", "early:0.8:2:4")
TEMPERATURE = 1.0
NORM_STD = 0.05
"""Of the norms' weights around 1: where they are 1, rounding before them is no difference."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=[name for name in SHAPES if "ouro" in name], default="ouro-1.4b")
    parser.add_argument("--requests", type=int, default=16, help="of each policy, decoded at the same time")
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt, and of each response")
    parser.add_argument("--commit", help="of a working tree without git")
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    recording = record.Recording(
        "difference_" + arguments.shape.replace("-", "_").replace(".", "_"),
        command=f"python -m benchmarks.difference --requests {arguments.requests} --tokens {arguments.tokens}",
        settings={
            "shape": arguments.shape,
            "policies": POLICIES,
            "temperature": TEMPERATURE,
            "std": 0.02,
            "norm_std": NORM_STD,
        },
        commit_id=arguments.commit,
        is_kept=not arguments.no_record,
    )
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", arguments.shape, norm_std=NORM_STD)
        torch.cuda.empty_cache()
        samples, policies, rescored = roll(model, folder / "log", arguments)
        torch.cuda.empty_cache()
        for results in measure(HFDirectory(model), samples, policies, rescored, rows=arguments.requests):
            recording.save(**results, seconds=round(time.perf_counter() - begun, 1))
        operations = difference_operations.compare(config_of(arguments.shape), arguments.requests)
    recording.finish(operations=operations, seconds=round(time.perf_counter() - begun, 1))
    print(json.dumps(recording.results, indent=1))
    return 0


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Prints a row, and returns it."""
    means = {key: row[key]["all"]["mean"] for key in ("to_trainer", "to_engine", "to_fp32")}
    print(f"{row['name']:45}", "  ".join(f"{key} {value:.2e}" for key, value in means.items()), flush=True)
    return row


def roll(model: Path, log: Path, arguments: argparse.Namespace) -> tuple[list[Any], list[str], list[list[float]]]:
    """Samples of all policies, the policy of each, and the engine's second opinion: its scores by trace."""
    from adapters.megatron.packing import TrainSample

    count, tokens = arguments.requests, arguments.tokens
    config, rng = config_of(arguments.shape), np.random.default_rng(0)
    per_token = 2 * config.num_kv_heads * config.head_dim * config.num_layers * config.num_loops * 2
    settings = EngineSettings(
        model=model,
        log_path=log,
        max_model_len=2 * tokens,
        dtype="bfloat16",
        max_num_seqs=count,
        kv_cache_bytes=max(64 << 20, 2 * per_token * (2 * tokens + 64) * count),
    )
    samples, policies, rescored = [], [], []
    with LocalEngine(settings) as engine:
        for policy in POLICIES:
            requests = [
                GenerationRequest(
                    request_id=f"{policy}/{i}",
                    prompt_token_ids=tuple(rng.integers(4, config.vocab_size, tokens).tolist()),
                    sampling=SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, ignore_eos=True),
                    seed=derive_seed(policy, i),
                    execution=policy,
                )
                for i in range(count)
            ]
            results = {result.request_id: result for result in engine.generate(requests)}
            ordered = [results[request.request_id] for request in requests]
            scored = engine.score(
                [
                    ScoreRequest(
                        request_id=f"score/{request.request_id}",
                        token_ids=request.prompt_token_ids + result.token_ids,
                        num_prompt_tokens=tokens,
                        temperature=TEMPERATURE,
                        trace=result.trace,
                    )
                    for request, result in zip(requests, ordered, strict=True)
                ]
            )
            rescored += [list(each.logprobs) for each in scored]
            policies += [policy] * count
            samples += [
                TrainSample(
                    prompt_token_ids=request.prompt_token_ids,
                    response_token_ids=result.token_ids,
                    rollout_logprobs=result.logprobs,
                    trace=torch.tensor(list(result.trace.data)),
                    temperature=TEMPERATURE,
                )
                for request, result in zip(requests, ordered, strict=True)
            ]
    return samples, policies, rescored


def measure(
    directory: HFDirectory, samples: list[Any], policies: list[str], rescored: list[list[float]], *, rows: int
) -> Iterator[dict[str, Any]]:
    """All differences so far, after each variant. `rows` is how many requests the engine decoded at once."""
    from adapters.megatron import runtime

    runtime.initialize(runtime.RuntimeSettings())
    engine = [list(sample.rollout_logprobs) for sample in samples]
    wide = yardstick.load(directory, torch.float32)
    with first_layer(wide) as exact_layer:
        exact = yardstick.score(wide, samples, 8192)
    model = yardstick.load(directory, torch.bfloat16)
    longest = max(sample.num_inputs for sample in samples)
    scores, layers, seconds, failed = {}, {"fp32": exact_layer}, {}, {}

    def row(name: str, values: list[list[float]]) -> dict[str, Any]:
        against = {"to_trainer": scores["trainer"], "to_engine": engine, "to_fp32": exact}
        found = {"name": name, **{key: apart(values, other, policies) for key, other in against.items()}}
        return show({**found, "after_one_layer": relative(layers.get(name), layers["trainer"])})

    others = {"engine": engine, "engine, scored again by trace": rescored, "fp32": exact}
    table: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for name, (variant, budget) in cases(rows, longest).items():
        begun = time.perf_counter()
        try:
            with variant(model), first_layer(model) as layers[name]:
                scores[name] = yardstick.score(model, samples, budget)
        except Exception as error:  # the others still say something
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
            print(f"{name}: {failed[name]}", flush=True)
        seconds[name] = round(time.perf_counter() - begun, 2)
        if name in scores:
            table.append(row(name, scores[name]))
        beside = beside or [row(*other) for other in others.items()]
        yield {
            "rows": [*table, *beside],
            "failed": failed,
            "variant_seconds": seconds,
            "tokens": sum(map(len, engine)),
            "rows_per_step": rows,
        }
    runtime.shutdown()


def cases(rows: int, longest: int) -> dict[str, tuple[variants.Variant, int]]:
    """Variants by name, with the tokens of a micro-batch."""
    v = variants
    return {
        "trainer": (v.as_it_is, 8192),
        "attention: torch's choice over buckets": (v.dense, 8192),
        "attention: plain products, softmax in fp32": (v.math_attention, 8192),
        "attention: fp32, rounded once": (v.wide_attention, 8192),
        "products: one sequence at a time": (v.as_it_is, longest),
        "products: one for each projection": (v.separate_products, 8192),
        f"products: {rows} rows at a time": (v.rows_at_a_time(rows), 8192),
        "between products: torch's own operations, whose norm rounds twice": (v.torch_operations, 8192),
        "the same, and rotation in bf16": (v.rotary_in_bf16, 8192),
        "norm: rounded before its weight too": (v.norm_rounded_twice, 8192),
        "rotary: table in fp32": (v.rotary_table_in_fp32, 8192),
        "log-softmax: of fp32 logits": (v.head_in_fp32, 8192),
    }


@contextlib.contextmanager
def first_layer(model: Any) -> Iterator[list[torch.Tensor]]:
    """Gets what the first layer returns when it is called first: the state of a micro-batch after one layer."""
    kept: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        if not kept:
            kept.append(output[0].float())

    hook = next(iter(model.model.layers)).register_forward_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()


def relative(one: list[torch.Tensor] | None, other: list[torch.Tensor]) -> dict[str, float] | None:
    """Norm of the difference over the norm, and which share of the values differs; None of other micro-batches."""
    if not one or one[0].shape != other[0].shape:
        return None
    difference = one[0] - other[0]
    return {
        "relative": float(difference.norm() / other[0].norm()),
        "differing": float((difference != 0).float().mean()),
    }


def apart(one: list[list[float]], other: list[list[float]], policies: list[str]) -> dict[str, dict[str, float]]:
    """Mean and largest difference, of all tokens and by policy."""
    found = {}
    for policy in ("all", *dict.fromkeys(policies)):
        chosen = [i for i, own in enumerate(policies) if policy in ("all", own)]
        found[policy] = yardstick.spread(np.concatenate([np.subtract(one[i], other[i]) for i in chosen]))
    return found


if __name__ == "__main__":
    sys.exit(main())
