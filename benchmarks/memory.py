"""Peak memory of a real trainer and a real engine at Ouro-1.4B's shape, beside what `tether.memory` says of them.

    python -m benchmarks.memory [--shape ouro-1.4b] [--no-engine] [--commit ID]

One trainer after the other in this process, with and without recompute and at two sizes of micro-batches: what is
allocated once it is built, and the most while it makes an update. One engine: what the device lacks while it runs.
The record is written after each. On a CPU the parts that can be counted are, at a small shape: weights, gradients,
masters and moments.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.contract import GenerationRequest, SamplingParams
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import record
from benchmarks.shapes import SHAPES, write_model
from providers.registry import provider
from tether import footprint
from tether.footprint import CONTEXT_BYTES, Shape
from tether.memory import read_shape
from tether.settings import Settings

SEQUENCE = 256
"""Tokens of a sample; 255 of them are inputs."""
CASES = ((True, 8192), (True, 16384), (False, 2048), (False, 4096))
"""recompute, tokens of a micro-batch."""
CACHE_BYTES = 4_000_000_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="ouro-1.4b" if torch.cuda.is_available() else "tiny-ouro")
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--commit", help="of a working tree without git")
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    recording = record.Recording(
        "memory_" + arguments.shape.replace("-", "_").replace(".", "_"),
        command=f"python -m benchmarks.memory --shape {arguments.shape}",
        settings={"shape": arguments.shape, "sequence_tokens": SEQUENCE, "engine_cache_bytes": CACHE_BYTES},
        commit_id=arguments.commit,
        is_kept=not arguments.no_record,
    )
    begun = time.perf_counter()
    recording.save(trainer=[])
    for row in trainers(arguments.shape):
        recording.results["trainer"].append(row)
        recording.save()
        print(json.dumps(row), flush=True)
    if not arguments.no_engine:
        recording.save(engine=engine(arguments.shape))
    recording.finish(seconds=round(time.perf_counter() - begun, 1))
    print(json.dumps(recording.results, indent=1))
    return 0


def shape_of(name: str, settings: Settings) -> Shape:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        return read_shape(Path(folder), settings, SEQUENCE)


def trainers(name: str) -> Iterator[dict[str, Any]]:
    """One row a case, as it comes."""
    from adapters.megatron import runtime

    runtime.initialize(runtime.RuntimeSettings())
    cases = CASES if torch.cuda.is_available() else ((True, 512), (False, 512))
    for recompute, tokens in cases:
        gc.collect()
        torch.cuda.empty_cache()
        yield one_trainer(name, recompute=recompute, tokens=tokens)
    runtime.shutdown()


def one_trainer(name: str, *, recompute: bool, tokens: int) -> dict[str, Any]:
    """Builds it, makes one update of two full micro-batches at full depth, and lets it go."""
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer

    settings = Settings(recompute=recompute, tokens_per_microbatch=tokens, dtype="bfloat16")
    shape = shape_of(name, settings)
    before = allocated()
    build = provider(SHAPES[name]["model_type"], "model").build
    model = build(shape.config, dtype=torch.bfloat16, recompute=recompute)
    trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-6), tokens_per_microbatch=tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    trainer.optimizer.reload_model_params()
    after = allocated()
    reset_peak()
    metrics = trainer.train(make_samples(shape.config, tokens))
    row = {
        "recompute": recompute,
        "tokens_per_microbatch": tokens,
        "counted": counted(trainer),
        "built_bytes": after - before if torch.cuda.is_available() else None,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else None,
        "estimate": {key: size for key, size in footprint.trainer(shape).items() if key != "staged weights"},
        "input_tokens": metrics["num_input_tokens"],
    }
    row["ratio"] = sum(row["estimate"].values()) / row["peak_bytes"] if row["peak_bytes"] else None
    release(trainer)
    return row


def release(trainer: Any) -> None:
    """Gives a trainer's memory back: the hooks of Megatron's DDP keep it alive, in a circle that Python cannot see."""
    weights, gradients, masters, moments = tensors_of(trainer)
    for tensor in (*weights, *gradients, *masters, *moments):
        tensor.untyped_storage().resize_(0)


def make_samples(config: Any, tokens: int) -> list[Any]:
    """Two full micro-batches of sequences at full depth."""
    from adapters.megatron.packing import TrainSample

    generator = torch.Generator().manual_seed(0)
    count, half = 2 * (tokens // (SEQUENCE - 1)), SEQUENCE // 2
    samples = []
    for i in range(count):
        ids = torch.randint(4, config.vocab_size, (SEQUENCE,), generator=generator).tolist()
        samples.append(
            TrainSample(
                prompt_token_ids=ids[:half],
                response_token_ids=ids[half:],
                rollout_logprobs=[-10.0] * half,
                advantage=1.0 if i % 2 else -1.0,
                trace=make_trace(config, generator),
            )
        )
    return samples


def make_trace(config: Any, generator: torch.Generator) -> torch.Tensor:
    """All loops, or random experts."""
    if not getattr(config, "num_experts", 0):
        return torch.full((SEQUENCE - 1,), config.layer_passes)
    chance = torch.rand(SEQUENCE - 1, config.num_layers, config.num_experts, generator=generator)
    return chance.topk(config.top_k, -1).indices


def counted(trainer: Any) -> dict[str, int]:
    """Bytes of the tensors that a trainer really holds; buffers with their padding."""
    weights, gradients, masters, moments = tensors_of(trainer)
    return {
        "weights": sum(tensor.nbytes for tensor in weights),
        "gradients": sum(tensor.nbytes for tensor in gradients),
        "masters and moments": sum(tensor.nbytes for tensor in (*masters, *moments)),
    }


def tensors_of(trainer: Any) -> tuple[list[torch.Tensor], ...]:
    """Weights, gradient buffers, masters where they are not the weights themselves, and moments."""
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    weights = [parameter.data for parameter in trainer.model.parameters()]
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    stepped = [p.data for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    masters = [p for p in stepped if p.untyped_storage().data_ptr() not in own]
    moments = [each for part in parts for state in part.optimizer.state.values() for each in state.values()]
    buffers = [*trainer.ddp.buffers, *trainer.ddp.expert_parallel_buffers]
    return weights, [buffer.grad_data for buffer in buffers], masters, moments


def engine(name: str) -> dict[str, Any]:
    """What the device has less of: once the engine serves, and after a batch of rollouts."""
    has_cuda = torch.cuda.is_available()
    cache = CACHE_BYTES if has_cuda else 64 << 20
    settings = Settings(kv_cache_bytes=cache, dtype="bfloat16", max_concurrent_samples=64)
    shape = shape_of(name, settings)
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", name)
        torch.cuda.empty_cache()
        before = used()
        options = EngineSettings(
            model=model,
            log_path=Path(folder) / "log",
            max_model_len=SEQUENCE,
            dtype="bfloat16",
            kv_cache_bytes=cache,
            max_num_seqs=settings.max_concurrent_samples,
        )
        with LocalEngine(options) as running:
            started = used() - before
            requests = [
                GenerationRequest(
                    request_id=str(i),
                    prompt_token_ids=tuple(range(4, 132)),
                    sampling=SamplingParams(max_tokens=16, ignore_eos=True),
                    seed=i,
                )
                for i in range(64)
            ]
            list(running.generate(requests))
            busy = used() - before
    estimate = {**footprint.engine(shape), "context": CONTEXT_BYTES}
    row = {"started_bytes": started, "busy_bytes": busy, "estimate": estimate, "cache_bytes": cache}
    row["ratio"] = sum(estimate.values()) / busy if has_cuda else None
    return row


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def used() -> int:
    """Of the device, by everybody."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
