"""The trainer's own rounding error on what an engine generated: bf16 scores of samples against fp32 scores of the same.

    python -m benchmarks.yardstick MODEL ROLLOUTS OUTPUT [--tokens-per-microbatch 8192]

Both dtypes hold the weights of MODEL and replay the traces of ROLLOUTS/update_*.jsonl. OUTPUT gets per update, and per
depth for a looped model, how far bf16 is from fp32: what a difference between trainer and engine is judged by. No
optimizer is made, so a model fits whose training state would not. One process, one device.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.hf_convert.directory import HFDirectory
from providers.registry import provider


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    for name in ("model", "rollouts", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tokens-per-microbatch", type=int, default=8192)
    parser.add_argument("--updates", type=int, nargs="+", help="those alone; all, if left out")
    arguments = parser.parse_args(argv)
    from adapters.megatron import runtime

    runtime.initialize(runtime.RuntimeSettings())
    directory = HFDirectory(arguments.model)
    updates = {
        number: read_samples(path, directory)
        for path in sorted(arguments.rollouts.glob("update_*.jsonl"))
        if (number := int(path.stem.removeprefix("update_"))) in (arguments.updates or [number])
    }
    scores = {
        dtype: {update: score(model, samples, arguments.tokens_per_microbatch) for update, samples in updates.items()}
        for dtype in (torch.bfloat16, torch.float32)
        for model in [load(directory, dtype)]
    }
    rows = [
        row
        for update, samples in updates.items()
        for row in compare(update, samples, scores[torch.bfloat16][update], scores[torch.float32][update])
    ]
    arguments.output.write_text(json.dumps(rows, indent=1))
    runtime.shutdown()
    return 0


def read_samples(path: Path, directory: HFDirectory) -> list[Any]:
    """The samples of an update, with their traces and the engine's log-probs."""
    from adapters.megatron.packing import TrainSample

    return [
        TrainSample(
            prompt_token_ids=line["prompt_token_ids"],
            response_token_ids=line["response_token_ids"],
            rollout_logprobs=line["logprobs"],
            temperature=line["temperature"],
            trace=trace_of(line, directory.config),
        )
        for line in map(json.loads, path.read_text().splitlines())
    ]


def trace_of(line: dict[str, Any], config: dict[str, Any]) -> torch.Tensor:
    """What each input token ran, from a line of OUT/rollouts."""
    if "experts" in line:
        rows = np.frombuffer(base64.b64decode(line["experts"]), np.uint8).reshape(line["experts_shape"])
        return torch.from_numpy(rows.astype("int64"))
    return torch.tensor([config["total_ut_steps"]] * len(line["prompt_token_ids"]) + line["exit_depths"][1:])


def load(directory: HFDirectory, dtype: torch.dtype, **options: Any) -> Any:
    """The training model alone, without optimizer and gradients."""
    model_type = directory.config["model_type"]
    config = provider(model_type, "config").Config.from_hf(directory.config)
    model = provider(model_type, "model").build(config, dtype=dtype, **options)
    with torch.no_grad():
        for _, own, stored in model.stored_parts(directory):
            own.copy_(stored)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def score(model: Any, samples: Sequence[Any], tokens_per_microbatch: int) -> list[list[float]]:
    """Log-probs of every response token, by sample, as `Trainer.score` computes them on one process."""
    from adapters.megatron.packing import pack, plan_microbatches
    from adapters.megatron.runtime import device

    lengths = [sample.num_inputs for sample in samples]
    scores: dict[int, list[float]] = {}
    for indices in plan_microbatches(lengths, max_tokens=tokens_per_microbatch, num_ranks=1)[0]:
        batch = pack([samples[i] for i in indices]).to(device())
        values = model(
            batch.tokens,
            batch.cu_seqlens,
            trace=batch.trace,
            rows=batch.rows,
            targets=batch.targets,
            temperature=batch.temperatures,
        )
        parts = values.double().cpu().split([samples[i].num_scored for i in indices])
        scores |= {i: part.tolist() for i, part in zip(indices, parts, strict=True)}
    return [scores[i] for i in range(len(samples))]


def compare(update: int, samples: Sequence[Any], narrow: Any, wide: Any) -> Iterable[dict[str, Any]]:
    """One row of all tokens, and one per depth where there are several."""
    flat = [np.concatenate([np.asarray(values) for values in scores]) for scores in (narrow, wide)]
    engine = np.concatenate([np.asarray(sample.rollout_logprobs) for sample in samples])
    depths = None
    if samples[0].trace.dim() == 1:
        depths = np.concatenate([sample.trace[len(sample.prompt_token_ids) - 1 :].numpy() for sample in samples])
    for depth in [None, *(np.unique(depths).tolist() if depths is not None else [])]:
        chosen = slice(None) if depth is None else depths == depth
        yield {
            "update": update,
            "depth": depth,
            "count": len(engine[chosen]),
            "own": spread(flat[0][chosen] - flat[1][chosen]),
            "engine_to_fp32": spread(engine[chosen] - flat[1][chosen]),
            "engine_to_bf16": spread(engine[chosen] - flat[0][chosen]),
        }


def spread(differences: np.ndarray) -> dict[str, float]:
    """Mean and largest absolute value."""
    apart = np.abs(differences)
    return {"mean": float(apart.mean()), "max": float(apart.max())}


if __name__ == "__main__":
    sys.exit(main())
