"""How long a publication takes on this machine, beside a memory copy of the same bytes in the same run.

    python -m benchmarks.publication [--repeats 5]             # 100 million parameters, CPU, fp32
    python -m benchmarks.publication --device cuda --staging ipc             # Ouro-1.4B's shape, bf16

A real engine on a random Ouro. Writes benchmarks/results/publication_{cpu,cuda_STAGING}.json: seconds by phase, beside
copies, tensor by tensor: into new memory (what a second copy of a state dict costs), and over memory that exists and is
mapped (`Tensor.copy_`, the bandwidth of memory), on one thread and on as many as a publication uses. New memory is
mapped for the copy on CPU, because what malloc gives may be memory that was used before, and `Tensor.clone` on CUDA.

Both processes use every core in turn. Where others work too, `--ahead` gives them the cores first, not the memory bus.

The limit is the bytes by the bandwidth of one large copy, over the bus and back where they travel through the host.
With `--staging ipc` vLLM's own transfer over CUDA IPC is measured in the same run (`publication_peer`), after the
record of ours is written.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adapters.clock import Clock
from adapters.contract import Version
from adapters.threads import spread
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.memory.staging import Staging
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import limits, publication_peer, record, shapes
from tests.tiny import write_ouro

CPU_SHAPE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_hidden_layers": 6,
}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
PAUSE = ("drain", "load", "read back", "settle")
"""The phases in which nothing is generated."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--staging", choices=["host", "shadow", "ipc"], default="host")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the command; records nothing")
    parser.add_argument("--ahead", action="store_true", help="rounds run before the machine's other work; needs root")
    parser.add_argument("--commit", help="of a working tree without git")
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    device, staging = arguments.device, arguments.staging
    shape = shape_of(device, is_tiny=arguments.tiny)
    recording = record.Recording(
        "publication_cpu" if device == "cpu" else f"publication_cuda_{staging}",
        command="python -m benchmarks.publication "
        + f"--repeats {arguments.repeats} --device {device} --staging {staging}{' --ahead' * arguments.ahead}",
        settings={**shape, "dtype": DTYPES[device], "staging": staging},
        commit_id=arguments.commit,
        is_kept=not (arguments.no_record or arguments.tiny),
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        settings, weights = prepare(Path(name), device, staging, is_tiny=arguments.tiny)
        peer = publication_peer.engine(settings) if staging == "ipc" else contextlib.nullcontext()
        with peer as client:  # comes up beside ours, and is idle until ours is done
            recording.save(**measure(settings, weights, arguments.repeats, is_ahead=arguments.ahead))
            print(recording.results, flush=True)
            if client is not None:
                found = beside(client, weights, arguments.repeats)
                recording.save(**found)
                print(found, flush=True)
    if "peers_failed" not in recording.results:
        recording.finish()
    return 0


def shape_of(device: str, *, is_tiny: bool) -> dict[str, Any]:
    if device == "cpu" and not is_tiny:
        return CPU_SHAPE
    return shapes.SHAPES["tiny-ouro" if is_tiny else "ouro-1.4b"]


def prepare(
    model: Path, device: str, staging: Staging, *, is_tiny: bool
) -> tuple[EngineSettings, dict[str, torch.Tensor]]:
    """A directory for the model -> settings of its engine, and its weights on the device."""
    if device == "cpu" and not is_tiny:
        write_ouro(model, **CPU_SHAPE)
    else:
        shapes.write_model(model, "tiny-ouro" if is_tiny else "ouro-1.4b", norm_std=0.1)
    settings = EngineSettings(
        model=model,
        log_path=model / "log",
        max_model_len=128,
        dtype=DTYPES[device],
        max_num_seqs=8,  # few CUDA graphs to capture
        kv_cache_bytes=256 << 20,
        staging=staging,
    )
    (file,) = model.glob("*.safetensors")
    weights = load_file(file, device=device)
    return settings, {name: tensor.to(getattr(torch, DTYPES[device])) for name, tensor in weights.items()}


def measure(
    settings: EngineSettings, weights: dict[str, torch.Tensor], repeats: int, *, is_ahead: bool = False
) -> dict[str, Any]:
    """The first two rounds are warm-up and dropped: until then the memory of the buckets grows to two versions."""
    load_before = os.getloadavg()[0]
    with LocalEngine(settings) as engine:
        if is_ahead:
            for pid in (0, engine.pid):
                os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
        rounds = [one_round(engine, weights, update) for update in range(1, repeats + 3)][2:]
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    phases = {name: record.spread([r[name] for r in rounds]) for name in rounds[0]}
    return {
        "num_parameters": sum(tensor.numel() for tensor in weights.values()),
        "num_bytes": num_bytes,
        "load_average": [load_before, os.getloadavg()[0]],
        "seconds": phases,
        "split": {name: record.spread([part[name] for part in map(split, rounds)]) for name in split(rounds[0])},
        "limit": limit(num_bytes, settings.staging, next(iter(weights.values())).device),
        "is_direct": "weights are loaded directly" in settings.log_path.read_text(),
        "peers": {},
        **{
            f"ratio_to_{name}": record.spread([r["publish"] / r[name] for r in rounds])
            for name in ("copy", "overwrite", "overwrite by threads")
        },
    }


def beside(client: publication_peer.PipeClient, weights: dict[str, torch.Tensor], repeats: int) -> dict[str, Any]:
    """What the peers took, or why they did not run."""
    try:
        peers = publication_peer.measure(client, weights, repeats)
    except Exception as error:  # what was measured of ours stays
        return {"peers": {}, "peers_failed": repr(error)}
    return {"peers": {f"vllm_ipc_{kind}": record.spread(seconds) for kind, seconds in peers.items()}}


def split(phases: dict[str, float]) -> dict[str, float]:
    """Seconds by what they are for. The pause holds the commit and the second half of verifying."""
    return {
        "pause": sum(phases[name] for name in PAUSE),
        "gather": phases["write"],
        "transfer": phases["stage"],
        "verify": phases["prepare"] + phases["read back"],
        "commit": phases["drain"] + phases["load"] + phases["settle"],
    }


def limit(num_bytes: int, staging: Staging, device: torch.device) -> dict[str, float]:
    """Bytes by the bandwidth of one large copy, measured now: on the device, and over the bus and back."""
    found = {"copy_seconds": 2 * num_bytes / limits.measure()["bytes_per_second"]}
    if device.type == "cuda" and staging != "ipc":
        size = min(1 << 30, num_bytes)
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        there_and_back = _fastest(host, memory) + _fastest(memory, host)
        found["bus_seconds"] = num_bytes / size * there_and_back
    return found


def _fastest(target: torch.Tensor, source: torch.Tensor) -> float:
    times = []
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        target.copy_(source)
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)


def one_round(engine: LocalEngine, weights: dict[str, torch.Tensor], update: int) -> dict[str, float]:
    """Copies, overwrites, and one publication of changed weights, in seconds."""
    for tensor in weights.values():
        tensor.mul_(1.001)
    wait()
    clock = Clock()
    copied = [copy_to_new_memory(tensor) for tensor in weights.values()]
    wait()
    clock.lap("copy")
    pairs = list(zip(copied, weights.values(), strict=True))
    for target, tensor in pairs:
        target.copy_(tensor)
    wait()
    clock.lap("overwrite")
    spread(lambda pair: pair[0].copy_(pair[1]), pairs, sizes=[tensor.nbytes for tensor in weights.values()])
    wait()
    clock.lap("overwrite by threads")
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
