"""Training replay of Ouro-1.4B's shape on one device: whole steps of the trainer at every kind of depth.

    python -m benchmarks.train_replay [--tiny] [--repeats 3] [--cases full fixed3 ...] [--profile] [--commit ID]

Random weights, made on the device; one process, the trainer as a run uses it. The peer is Ouro's body in plain PyTorch
(`plain_ouro.py`), the limit one large matrix product, both measured first in the same run. Every row is printed and
written as it comes. --tiny is for a machine without CUDA: it prints and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from adapters.megatron import runtime
from adapters.megatron.attention import sdpa_attention
from adapters.megatron.optimizer import OptimizerSettings
from adapters.megatron.packing import TrainSample
from adapters.megatron.trainer import Trainer
from benchmarks import limits, measure, record
from benchmarks.plain_ouro import PlainOuro
from benchmarks.shapes import SHAPES
from providers.ouro.config import OuroConfig
from providers.ouro.model import build
from tether.throughput import forward_flops

DEPTHS = ("full", "fixed3", "fixed2", "early_exit")
EXIT_SHARES = (0.1, 0.3, 0.3, 0.3)
"""Of generated tokens that leave after 1, 2, 3 and 4 loops in the early-exit case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depths", nargs="+", default=list(DEPTHS), choices=DEPTHS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sdpa", action="store_true", help="attention over dense buckets, to compare kernels")
    parser.add_argument("--any-order", action="store_true", help="sums in any order: not bitwise repeatable")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--name", default="train_replay_cuda")
    parser.add_argument("--commit", help="of a working tree without git")
    a = parser.parse_args()
    hf, layouts = SHAPES["tiny-ouro" if a.tiny else "ouro-1.4b"], [(16, 1024), (64, 256)]
    if a.tiny:
        layouts = [(3, 40), (8, 10)]
    settings = {"model": hf, "repeats": a.repeats, "exit_shares": EXIT_SHARES, "dtype": "bfloat16"}
    settings |= {"attention": "sdpa" if a.sdpa else "varlen", "deterministic": not a.any_order}
    command = "python -m benchmarks.train_replay " + " ".join(sys.argv[1:])
    recording = record.Recording(a.name, command=command, settings=settings, commit_id=a.commit, is_kept=not a.tiny)
    runtime.initialize(runtime.RuntimeSettings(deterministic=not a.any_order))
    recording.save(limit=measure.rounded(limits.measure()), updates=[], peers=[])

    def add(to: str, row: dict[str, Any]) -> None:
        recording.results[to].append(measure.rounded(row))
        recording.save()
        print(json.dumps({k: v for k, v in recording.results[to][-1].items() if k != "kernels"}), flush=True)

    for recompute in () if a.no_peer else (True, False):
        add("peers", peer(hf, recompute=recompute, tiny=a.tiny, repeats=a.repeats))
    trainer = make_trainer(hf, sdpa=a.sdpa)
    runtime.freeze_objects()  # as a run does before its first update
    for sequences, length in layouts:
        first = length == layouts[0][1]
        for depth in a.depths if first else [d for d in a.depths if d in ("full", "early_exit")]:
            # Without recomputation the activations limit the micro-batch; that is measured at the first length.
            for recompute in (True, False) if first else (True,):
                samples = make_samples(hf, sequences, length, depth)
                add("updates", updates(trainer, samples, depth, recompute=recompute, a=a))
    recording.finish()


def make_trainer(hf: dict[str, Any], *, sdpa: bool) -> Trainer:
    model = build(OuroConfig.from_hf(hf), dtype=torch.bfloat16, attention=sdpa_attention if sdpa else None)
    trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-6), tokens_per_microbatch=1)
    measure.fill_randomly(dict(model.local_parts()))
    trainer.optimizer.reload_model_params()
    return trainer


def make_samples(hf: dict[str, Any], count: int, length: int, depth: str) -> list[TrainSample]:
    """`count` samples of `length` input tokens, a quarter of them prompt."""
    rng, loops = random.Random(0), hf["total_ut_steps"]
    prompt = length // 4
    response = length - prompt + 1
    samples = []
    for _ in range(count):
        if depth == "early_exit":
            generated = rng.choices(range(1, loops + 1), EXIT_SHARES, k=response - 1)
        else:
            generated = [{"full": loops, "fixed3": 3, "fixed2": 2}[depth]] * (response - 1)
        tokens = [rng.randrange(4, hf["vocab_size"]) for _ in range(prompt + response)]
        samples.append(
            TrainSample(
                prompt_token_ids=tokens[:prompt],
                response_token_ids=tokens[prompt:],
                rollout_logprobs=[-10.8] * response,
                advantage=rng.uniform(-1, 1),
                trace=torch.tensor([loops] * prompt + generated),
            )
        )
    return samples


def updates(
    trainer: Trainer, samples: list[TrainSample], depth: str, *, recompute: bool, a: argparse.Namespace
) -> dict[str, Any]:
    """Whole updates, and in them forward + backward and the optimizer's step by themselves."""
    length = samples[0].num_inputs
    trainer.model.model.recompute = recompute
    trainer.tokens_per_microbatch = length * (len(samples) if recompute else max(1, len(samples) // 2))
    parts: dict[str, list[float]] = {"forward_backward": [], "optimizer_step": []}
    whole: dict[str, float] = {}

    def run() -> None:
        with timed(trainer, "_forward_backward", parts["forward_backward"]):
            with timed(trainer.optimizer, "step", parts["optimizer_step"]):
                whole.update(measure.seconds(lambda: trainer.train(samples), repeats=a.repeats))

    memory = measure.peak_bytes(run)
    spreads = {name: record.spread(values[1:]) for name, values in parts.items()}
    tokens = sum(s.num_inputs for s in samples)
    flops = 3 * sum(
        forward_flops(trainer.model.ouro, s.trace.numpy(), num_prompt_tokens=len(s.prompt_token_ids)) for s in samples
    )
    taken = spreads["forward_backward"]["median"]
    row = {
        "depth": depth,
        "sequences": len(samples),
        "tokens_each": length,
        "recompute": recompute,
        "tokens_per_microbatch": trainer.tokens_per_microbatch,
        "token_passes": int(sum(s.trace.sum() for s in samples)),
        "update_seconds": whole,
        **{f"{name}_seconds": spread for name, spread in spreads.items()},
        "tokens_per_second": tokens / taken,
        "model_flops_per_second": flops / taken,
        "memory_bytes": memory,
    }
    if a.profile and recompute:
        row["kernels"] = measure.top_kernels(lambda: trainer.train(samples))
    return row


@contextmanager
def timed(owner: Any, name: str, taken: list[float]) -> Any:
    """While it lasts, appends the seconds of every call of a method until the device is done."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        measure.synchronize()
        started = time.perf_counter()
        result = method(*args, **options)
        measure.synchronize()
        taken.append(time.perf_counter() - started)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def peer(hf: dict[str, Any], *, recompute: bool, tiny: bool, repeats: int) -> dict[str, Any]:
    """Forward and backward of the body alone, sequences of 2,048 tokens."""
    count, length = (2, 16) if tiny else (8 if recompute else 2, 2048)
    model = PlainOuro(hf, recompute=recompute).to(measure.device(), torch.bfloat16)
    measure.fill_randomly(dict(model.named_parameters()))
    tokens = torch.randint(4, hf["vocab_size"], (count, length), device=measure.device())

    def step() -> None:
        measure.drop_gradients(model)
        model(tokens).float().square().mean().backward()

    taken = measure.seconds(step, repeats=repeats)
    config, passes = OuroConfig.from_hf(hf), np.full(length, hf["total_ut_steps"])
    head = 2 * config.hidden_size * config.vocab_size  # the formula counts one scored row behind a prompt of all tokens
    flops = 3 * count * (forward_flops(config, passes, num_prompt_tokens=length) - head)
    return {
        "what": "plain PyTorch, body alone",
        "sequences": count,
        "tokens_each": length,
        "recompute": recompute,
        "seconds": taken,
        "tokens_per_second": count * length / taken["median"],
        "model_flops_per_second": flops / taken["median"],
        "memory_bytes": measure.peak_bytes(step),
    }


if __name__ == "__main__":
    main()
