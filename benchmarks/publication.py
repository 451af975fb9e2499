"""How long a publication takes on this machine, beside a memory copy of the same bytes in the same run.

    python -m benchmarks.publication [--repeats 5] [--layers 6]              # 100 million parameters, CPU, fp32
    python -m benchmarks.publication --device cuda --staging ipc             # Ouro-1.4B's shape, bf16

A real engine on a random Ouro. Writes benchmarks/results/publication_{cpu,cuda_STAGING}.json: seconds by phase, beside
two copies, tensor by tensor: into new memory (what a second copy of a state dict costs), and over memory that exists
and is mapped (`Tensor.copy_`, the bandwidth of memory). New memory is mapped for the copy on CPU, because what malloc
gives may be memory that was used before, and `Tensor.clone` on CUDA. On CPU with one thread.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adapters.clock import Clock
from adapters.contract import Version
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.memory.staging import Staging
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import record
from tests.tiny import write_ouro

SHAPES = {
    "cpu": {
        "vocab_size": 16384,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "num_hidden_layers": 6,
    },
    "cuda": {
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_hidden_layers": 24,
    },
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--staging", choices=["host", "shadow", "ipc"], default="host")
    parser.add_argument("--commit", help="of a working tree without git, as on a lent machine")
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    device, staging = arguments.device, arguments.staging
    if not (arguments.no_record or arguments.commit):
        record.commit()
    torch.set_num_threads(1)
    results = measure(device, staging, arguments.repeats)
    print(results)
    if not arguments.no_record:
        print(
            record.write(
                "publication_cpu" if device == "cpu" else f"publication_cuda_{staging}",
                command="python -m benchmarks.publication "
                + f"--repeats {arguments.repeats} --device {device} --staging {staging}",
                settings={**SHAPES[device], "dtype": str(DTYPES[device]), "staging": staging},
                results=results,
                commit_id=arguments.commit,
            )
        )
    return 0


def measure(device: str, staging: Staging, repeats: int) -> dict[str, Any]:
    """The first two rounds are warm-up and dropped: until then the memory of the buckets grows to two versions."""
    dtype = DTYPES[device]
    with tempfile.TemporaryDirectory() as name:
        model = write_ouro(Path(name), dtype=dtype, **SHAPES[device])
        weights = load_file(model / "model.safetensors", device=device)
        settings = EngineSettings(
            model=model,
            log_path=model / "log",
            max_model_len=128,
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_bytes=256 << 20,
            staging=staging,
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
    wait()
    clock = Clock()
    copied = [copy_to_new_memory(tensor) for tensor in weights.values()]
    wait()
    clock.lap("copy")
    for target, tensor in zip(copied, weights.values(), strict=True):
        target.copy_(tensor)
    wait()
    clock.lap("overwrite")
    report = engine.publish(Version(1, update), weights)
    clock.lap("publish")
    return {**clock.seconds, **report.seconds}


def copy_to_new_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        return tensor.clone()
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # as malloc maps
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
