"""Packed replay of mixed depths against replaying the sequences one by one: whole training updates on this machine.

    python -m benchmarks.replay [--sequences 1 4 16] [--repeats 5]

Both sides are the same trainer on the same samples; one packs them into one micro-batch, the other makes a micro-batch
of each. Runs alternate, so a machine that changes speed changes both. Ratios above 1 mean that packing is faster.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from adapters.hf_convert.directory import HFDirectory
from adapters.megatron import runtime
from adapters.megatron.optimizer import OptimizerSettings
from adapters.megatron.packing import TrainSample
from adapters.megatron.trainer import Trainer
from benchmarks import record
from providers.ouro.config import OuroConfig
from providers.ouro.model import build
from tests.tiny import write_ouro

LOOPS, LONGEST = 4, 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    record.commit()
    torch.set_num_threads(1)
    runtime.initialize(runtime.RuntimeSettings())
    with tempfile.TemporaryDirectory() as folder:
        directory = HFDirectory(write_ouro(Path(folder)))
        results = [
            compare(directory, count, mixed=mixed, repeats=arguments.repeats)
            for count in arguments.sequences
            for mixed in (False, True)
        ]
    path = record.write(
        "replay_packed_cpu",
        command="python -m benchmarks.replay",
        settings={"model": "tiny Ouro, 3 layers, hidden 128", "repeats": arguments.repeats, "threads": 1},
        results=results,
    )
    for row in results:
        print(f"{row['sequences']:3d} sequences, {row['depth']}: packed {row['ratio']:.2f}x faster than one by one")
    print(path)


def compare(directory: HFDirectory, count: int, *, mixed: bool, repeats: int) -> dict[str, Any]:
    """Seconds per update both ways, over alternating runs after one warm-up."""
    samples = make_samples(count, mixed=mixed)
    packed, single = (make_trainer(directory, tokens_per_microbatch=budget) for budget in (1 << 20, LONGEST))
    seconds: dict[str, list[float]] = {"packed": [], "one_by_one": []}
    for turn in range(repeats + 1):
        for name, trainer in (("packed", packed), ("one_by_one", single)):
            started = time.perf_counter()
            trainer.train(samples)
            if turn:
                seconds[name].append(time.perf_counter() - started)
    spreads = {name: record.spread(values) for name, values in seconds.items()}
    return {
        "sequences": count,
        "depth": "mixed depths" if mixed else "full depth",
        "input_tokens": sum(s.num_inputs for s in samples),
        "loop_tokens": sum(int(s.trace.sum()) for s in samples if s.trace is not None),
        "seconds": spreads,
        "ratio": spreads["one_by_one"]["median"] / spreads["packed"]["median"],
    }


def make_trainer(directory: HFDirectory, *, tokens_per_microbatch: int) -> Trainer:
    model = build(OuroConfig.from_hf(directory.config), dtype=torch.float32)
    trainer = Trainer(
        model, optimizer=OptimizerSettings(learning_rate=1e-5), tokens_per_microbatch=tokens_per_microbatch
    )
    trainer.load_hf(directory)
    return trainer


def make_samples(count: int, *, mixed: bool) -> list[TrainSample]:
    """Sequences of 82 to 160 tokens, a fifth of them prompt; generated tokens at random depths if mixed.

    No two of them fit a budget of LONGEST tokens, so that budget replays them one by one.
    """
    rng = random.Random(0)
    samples = []
    for _ in range(count):
        length = rng.randint(LONGEST // 2 + 2, LONGEST)
        prompt = length // 5
        loops = [LOOPS] * prompt + [rng.randint(1, LOOPS) if mixed else LOOPS for _ in range(length - prompt - 1)]
        tokens = [rng.randrange(2, 256) for _ in range(length)]
        samples.append(
            TrainSample(
                prompt_token_ids=tokens[:prompt],
                response_token_ids=tokens[prompt:],
                rollout_logprobs=[-5.5] * (length - prompt),
                advantage=rng.uniform(-1, 1),
                trace=torch.tensor(loops),
            )
        )
    return samples


if __name__ == "__main__":
    main()
