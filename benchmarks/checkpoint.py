"""How long checkpoints take on this machine, beside torch.save and torch.load of the same tensors in the same run.

    python -m benchmarks.checkpoint [--repeats 3] [--layers 6]

One trainer process with a random bf16 Ouro of about 100 million parameters, fp32 masters and moments: 14 bytes each.
Writes benchmarks/results/checkpoint_cpu.json, or checkpoint_cuda.json where there is a CUDA device. `stall` is how long
training stands still, `duration` how long until a checkpoint is durable; all files are synced to disk. The asynchronous
ones are written while an update is made. The record is written after every round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.megatron.checkpoint_reader import CheckpointReader
from benchmarks import record
from tests.tiny import write_ouro
from tests.unit.megatron_side.samples import make_samples, make_trainer

SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
FORMATS = ("reshardable", "same_layout")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--commit", help="of a working tree without git")
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    recording = record.Recording(
        "checkpoint_cuda" if torch.cuda.is_available() else "checkpoint_cpu",
        command=f"python -m benchmarks.checkpoint --repeats {arguments.repeats} --layers {arguments.layers}",
        settings={**SHAPE, "dtype": "bfloat16"},
        commit_id=arguments.commit,
        is_kept=not arguments.no_record,
    )
    torch.set_num_threads(1)
    for results in measure(arguments.layers, arguments.repeats):
        recording.save(**results)
        print(results, flush=True)
    recording.finish()
    return 0


def measure(layers: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Figures of all rounds so far, after each; the first round is warm-up and dropped."""
    from adapters.megatron import runtime

    runtime.initialize(runtime.RuntimeSettings())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_ouro(folder / "model", num_hidden_layers=layers, dtype=torch.bfloat16, **SHAPE)
        trainer = make_trainer(model, dtype=torch.bfloat16)
        num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        one_round(trainer, folder / "round")
        rounds = []
        for _ in range(repeats):
            num_bytes, seconds = one_round(trainer, folder / "round")
            rounds.append(seconds)
            yield {
                "num_parameters": num_parameters,
                "num_bytes": num_bytes,
                "seconds": {key: record.spread([r[key] for r in rounds]) for key in seconds},
                "ratio_to_torch_save": record.spread([r["reshardable save"] / r["torch.save"] for r in rounds]),
            }
    runtime.shutdown()


def one_round(trainer: Any, folder: Path) -> tuple[int, dict[str, float]]:
    """Every way once, on one state: its bytes, and seconds; update times are of the updates made meanwhile."""
    from adapters.megatron import checkpoint

    seconds: dict[str, float] = {}
    samples = make_samples(5)
    seconds["update alone"] = timed(lambda: trainer.train(samples))
    for format in FORMATS:
        save = checkpoint.begin(folder / format, trainer, {}, format=format)
        seconds[f"{format} save"] = save.complete().duration_seconds
        seconds[f"{format} load"] = timed(lambda f=format: checkpoint.load(folder / f, trainer))
    reader = CheckpointReader(folder / "reshardable" / f"iter_{trainer.num_updates:07d}")
    num_bytes = plain(dict(reader.read(reader.shapes)), folder / "plain.pt", seconds)
    for format in FORMATS:
        pending = checkpoint.begin(folder / f"{format}_async", trainer, {}, format=format)
        seconds[f"{format} async: update meanwhile"] = timed(lambda: trainer.train(samples))
        while not pending.is_written():
            time.sleep(0.01)
        saved = pending.complete()
        seconds[f"{format} async: stall"] = saved.stall_seconds
        seconds[f"{format} async: duration"] = saved.duration_seconds
    shutil.rmtree(folder)
    return num_bytes, seconds


def plain(tensors: dict[str, torch.Tensor], path: Path, seconds: dict[str, float]) -> int:
    """torch's own way to save and load the tensors; how many bytes they have."""

    def save() -> None:
        torch.save(tensors, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    seconds["torch.save"] = timed(save)
    seconds["torch.load"] = timed(lambda: torch.load(path))
    return sum(tensor.nbytes for tensor in tensors.values())


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
