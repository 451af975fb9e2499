"""How long a publication takes on this machine, beside a memory copy of the same bytes in the same run.

    python -m benchmarks.publication [--repeats 5] [--layers 6]

A real engine on a random Ouro of about 100 million parameters. Writes benchmarks/results/publication_cpu.json: seconds
by phase, beside two copies with one thread, tensor by tensor: into new memory (`Tensor.clone`, what a second copy of a
state dict costs), and over memory that exists and is mapped (`Tensor.copy_`, the bandwidth of memory).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adapters.contract import Version
from adapters.vllm_engine.local import LocalEngine
from adapters.vllm_engine.offers import Clock
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import record
from tests.tiny import write_ouro

SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    if not arguments.no_record:
        record.commit()
    torch.set_num_threads(1)
    results = measure(arguments.layers, arguments.repeats)
    print(results)
    if not arguments.no_record:
        command = f"python -m benchmarks.publication --repeats {arguments.repeats} --layers {arguments.layers}"
        print(record.write("publication_cpu", command=command, settings={**SHAPE, "dtype": "float32"}, results=results))
    return 0


def measure(layers: int, repeats: int) -> dict[str, Any]:
    """The first two rounds are warm-up and dropped: until then shared memory grows to two versions."""
    with tempfile.TemporaryDirectory() as name:
        model = write_ouro(Path(name), num_hidden_layers=layers, **SHAPE)
        weights = load_file(model / "model.safetensors")
        settings = EngineSettings(
            model=model, log_path=model / "log", max_model_len=128, dtype="float32", kv_cache_bytes=256 << 20
        )
        with LocalEngine(settings) as engine:
            rounds = [one_round(engine, weights, update) for update in range(1, repeats + 3)][2:]
    num_parameters = sum(tensor.numel() for tensor in weights.values())
    phases = {name: record.spread([r[name] for r in rounds]) for name in rounds[0]}
    return {
        "num_parameters": num_parameters,
        "num_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "seconds": phases,
        "ratio_to_copy": record.spread([r["publish"] / r["copy"] for r in rounds]),
        "ratio_to_overwrite": record.spread([r["publish"] / r["overwrite"] for r in rounds]),
    }


def one_round(engine: LocalEngine, weights: dict[str, torch.Tensor], update: int) -> dict[str, float]:
    """One copy, one overwrite, and one publication of changed weights, in seconds."""
    for tensor in weights.values():
        tensor.mul_(1.001)
    clock = Clock()
    copied = [tensor.clone() for tensor in weights.values()]
    clock.lap("copy")
    for target, tensor in zip(copied, weights.values(), strict=True):
        target.copy_(tensor)
    clock.lap("overwrite")
    report = engine.publish(Version(1, update), weights)
    clock.lap("publish")
    return {**clock.seconds, **report.seconds}


if __name__ == "__main__":
    sys.exit(main())
