"""Forward and backward of OLMoE-1B-7B's shape with recomputation: our model against transformers' in the same run.

    python -m benchmarks.olmoe_train [--tiny] [--repeats 5] [--profile] [--commit ID]

Weights and gradients in bf16, no optimizer state; 8,192 tokens in 4 sequences. The routers choose (random weights: the
experts are used alike). transformers runs its grouped_mm experts under gradient checkpointing. The limit is one large
matrix product, measured in the same run. Each model's row is written as it comes. --tiny is for a machine without CUDA:
it prints and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adapters.megatron import runtime
from benchmarks import limits, measure, record
from benchmarks.shapes import SHAPES
from providers.olmoe.config import OlmoeConfig
from providers.olmoe.model import build
from tether.throughput import forward_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="olmoe_train_cuda")
    parser.add_argument("--commit", help="of a working tree without git")
    a = parser.parse_args()
    hf, shape = SHAPES["tiny-olmoe" if a.tiny else "olmoe-1b-7b"], (2, 24) if a.tiny else (4, 2048)
    settings = {"model": hf, "sequences": shape[0], "tokens_each": shape[1], "repeats": a.repeats, "recompute": True}
    command = "python -m benchmarks.olmoe_train " + " ".join(sys.argv[1:])
    recording = record.Recording(a.name, command=command, settings=settings, commit_id=a.commit, is_kept=not a.tiny)
    runtime.initialize(runtime.RuntimeSettings())
    tokens = torch.randint(4, hf["vocab_size"], shape, device=measure.device())
    recording.save(limit=measure.rounded(limits.measure()))

    def add(name: str, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        row = measure.rounded(timed(model, loss, hf, tokens, a))
        recording.save(**{name: row})
        print(name, json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)

    add("ours", *ours(hf, tokens))
    torch.use_deterministic_algorithms(False)
    add("transformers", *peer(hf, tokens))
    add("ours, sums in any order, Megatron's dispatcher", *ours(hf, tokens, dispatched=True))
    recording.finish()


def ours(hf: dict[str, Any], tokens: Tensor, *, dispatched: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Our model, and the loss of one pass over the packed sequences.

    Args:
        dispatched: tokens go through Megatron's dispatcher, as they do when other ranks have experts.
    """
    model = build(OlmoeConfig.from_hf(hf), dtype=torch.bfloat16, recompute=True)
    for layer in model.model.layers:
        layer.mlp.has_all_experts &= not dispatched
    measure.fill_randomly(dict(model.local_parts()))
    bounds = torch.arange(0, tokens.numel() + 1, tokens.shape[1])
    targets = tokens.roll(-1, 1).flatten()
    return model, lambda: -model(tokens.flatten(), bounds, targets=targets).mean()


def peer(hf: dict[str, Any], tokens: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """transformers' model, and its own loss of the sequences as a batch."""
    import transformers

    names = hf.keys() - {"architectures", "model_type", "torch_dtype"}
    config = transformers.OlmoeConfig(**{name: hf[name] for name in names})
    kind = "grouped_mm" if measure.is_cuda() else "eager"
    with measure.device():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation=kind
        )
    model.to(measure.device()).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def timed(
    model: nn.Module, loss: Callable[[], Tensor], hf: dict[str, Any], tokens: Tensor, a: argparse.Namespace
) -> dict[str, Any]:
    """Forward and backward; the model is gone afterwards but for the caller's last reference."""

    def step() -> None:
        measure.drop_gradients(model)
        loss().backward()

    taken: dict[str, float] = {}
    memory = measure.peak_bytes(lambda: taken.update(measure.seconds(step, repeats=a.repeats, warmup=2)))
    flops = 3 * len(tokens) * forward_flops(OlmoeConfig.from_hf(hf), np.ones(tokens.shape[1]), num_prompt_tokens=1)
    row = {
        "seconds": taken,
        "tokens_per_second": tokens.numel() / taken["median"],
        "model_flops_per_second": flops / taken["median"],
        "memory_bytes": memory,
        "loss": float(loss().detach()),
    }
    if a.profile:
        row["kernels"] = measure.top_kernels(step)
    model.to("meta")  # its memory is the next one's
    gc.collect()
    if measure.is_cuda():
        torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main()
