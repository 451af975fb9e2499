"""Memory of an export: 1 GB of fp32 weights, from a checkpoint and from a Hugging Face directory, in shards of 200 MB.

    python -m benchmarks.export_memory [--folder DIR]

Writes results/export_memory.json: how much the peak of the exporting process grew over what it holds before. Fails when
that is more than one shard and one tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

SHARD_BYTES = 200_000_000
CONFIG: dict[str, Any] = {
    "model_type": "ouro", "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 13,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "total_ut_steps": 4, "torch_dtype": "float32",
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    from providers.registry import provider

    config = provider("ouro", "config").Config.from_hf(CONFIG)
    return {name: tensor.shape for name, tensor in provider("ouro", "physical").physical_tensors(config).items()}


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes().items():
        yield name, torch.randn(shape, generator=generator)


def build(folder: Path) -> None:
    """The model as a Hugging Face directory, and the same as a checkpoint of a run."""
    from torch.distributed import checkpoint

    from adapters.hf_convert.export import export_directory
    from adapters.megatron import checkpoint_files as files

    (folder / "source").mkdir(parents=True)
    (folder / "source" / "config.json").write_text(json.dumps(CONFIG))
    export_directory(tensors=tensors(), source=folder / "source", destination=folder / "hf")
    staging = files.staging_name(folder / "run" / "checkpoints", 1)
    files.prepare(staging)
    checkpoint.save(dict(tensors()), checkpoint_id=staging, no_dist=True)
    files.commit(
        staging,
        files.final_name(folder / "run" / "checkpoints", 1),
        {"extra": {}},
        files.facts(staging, files.names_in(staging)),
    )
    (folder / "run" / "run.json").write_text(json.dumps({"model": str(folder / "hf")}))


def measure(weights: Path, destination: Path) -> dict[str, float]:
    """Exports in this process, and says by how many bytes its peak grew and how long it took."""
    from adapters.hf_convert.manifest import spec_of
    from tether.exporting import ExportOptions, export_weights
    from tether.stored import open_weights

    spec_of("warm", torch.zeros(1 << 20))  # the compiled digest
    opened = open_weights(weights)
    before, began = _memory("VmRSS"), time.perf_counter()
    export_weights(opened, destination, ExportOptions(max_shard_bytes=SHARD_BYTES))
    return {"growth_bytes": _memory("VmHWM") - before, "seconds": round(time.perf_counter() - began, 1)}


def _memory(field: str) -> int:
    """Bytes resident now (VmRSS) or at most (VmHWM). Not ru_maxrss: that counts what the parent held at the fork."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    commit = record.commit()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        build(folder)
        sizes = [4 * torch.Size(shape).numel() for shape in shapes().values()]
        results: dict[str, Any] = {"weights_bytes": sum(sizes), "shard_bytes": SHARD_BYTES, "tensor_bytes": max(sizes)}
        for kind, weights in (("checkpoint", folder / "run"), ("directory", folder / "hf")):
            command = [sys.executable, "-m", "benchmarks.export_memory", "--measure", str(weights), str(folder / kind)]
            # Freed tensors go back to the system, so that the peak is what is held.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            results[kind] = json.loads(run.stdout)
            print(f"{kind}: peak grew by {results[kind]['growth_bytes'] / 1e6:.0f} MB, {results[kind]['seconds']} s")
    bound = SHARD_BYTES + max(sizes)
    print(f"one shard and one tensor: {bound / 1e6:.0f} MB, of {sum(sizes) / 1e6:.0f} MB")
    command_line = "python -m benchmarks.export_memory"
    record.write("export_memory", command=command_line, settings={"config": CONFIG}, results=results, commit_id=commit)
    if max(results[kind]["growth_bytes"] for kind in ("checkpoint", "directory")) > bound:
        raise SystemExit("more than one shard and one tensor")


if __name__ == "__main__":
    main()
