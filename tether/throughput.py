"""How much an update computed, and how fast: tokens per second, model FLOP/s, and their share of a device's peak.

Model FLOPs are what the algorithm needs, two for each multiply-add of a matrix product (arXiv:2204.02311, appendix B).
Recomputed activations, padding, norms, rotary embedding, softmax and the optimizer are not counted. A backward pass
costs two forward passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tether.settings import Settings

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample
    from tether.prepare import Job


def forward_flops(config: Any, passes: np.ndarray, *, num_prompt_tokens: int) -> int:
    """Of one sample's forward pass.

    With H hidden size, q and k the widths of queries and of keys, W the feed-forward width that a token runs, E experts
    and L layers, an input token at position t (from 1) that runs every layer p times costs
    p L (2 (H (q + 2k) + q H + 3 H W + H E) + 4 q t); a scored row costs 2 H V.

    Args:
        config: a provider's.
        passes: [input tokens] how often each one runs every layer.
    """
    c, passes = config, passes.astype(np.int64)
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    weights = 2 * queries + 2 * keys + 3 * c.active_width + getattr(c, "num_experts", 0)
    positions = np.arange(1, len(passes) + 1)
    layers = 2 * c.hidden_size * weights * int(passes.sum()) + 4 * queries * int((passes * positions).sum())
    scored = len(passes) - num_prompt_tokens + 1
    return c.num_layers * layers + 2 * c.hidden_size * c.vocab_size * scored


def training_flops(job: Job, samples: Sequence[TrainSample]) -> int:
    """Of one update over its samples, all ranks together, the pass that finds old log-probs included."""
    s, passes = job.settings, job.part("trace").passes
    forward = sum(
        forward_flops(job.config, passes(sample.trace, job.config), num_prompt_tokens=len(sample.prompt_token_ids))
        for sample in samples
    )
    scores_first = s.old_policy == "trainer" and s.mini_batches * s.epochs > 1
    return forward * (3 * s.epochs + scores_first)


def device_memory() -> dict[str, int]:
    """Of this process's CUDA device, in bytes; nothing on CPU.

    train_peak_bytes is the most that this trainer's tensors have taken since the last call, device_used_bytes what all
    processes have of the device now, caches of their allocators and contexts included.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved()
    return {"train_peak_bytes": peak, "train_reserved_bytes": reserved, "device_used_bytes": total - free}


def rates(metrics: Mapping[str, Any], s: Settings) -> dict[str, Any]:
    """What an update's line of metrics says per second. Of rollouts nothing, when they were made beside training.

    Args:
        metrics: with the seconds of its phases and train_model_flops.
    """
    seconds, flops = metrics["train_seconds"], metrics["train_model_flops"]
    if not metrics["num_steps"] + metrics["skipped_steps"]:
        flops = 0  # nothing was left to train on
    found = {
        "train_tokens_per_second": metrics["num_input_tokens"] * s.epochs / seconds if flops else 0.0,
        "train_flops_per_second": flops / seconds,
    }
    if s.peak_flops:
        found["train_mfu"] = flops / seconds / (s.peak_flops * s.train_devices)
    if not s.overlap_rollouts:
        found["rollout_tokens_per_second"] = metrics["num_response_tokens"] / metrics["rollout_seconds"]
    return {name: float(f"{value:.6g}") for name, value in found.items()}
