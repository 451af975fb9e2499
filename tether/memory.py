"""Estimates what a run needs, for the dry run. Figures are per device, and rough: what dominates, not every buffer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tether.prepare import Job

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATIONS_PER_LAYER = 16
"""Vectors of hidden size that one layer keeps for its backward pass, the wide part of the MLP counted apart."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes by purpose."""

    trainer: dict[str, int]
    engine: dict[str, int]

    def lines(self) -> list[str]:
        """Text, one line per side."""
        return [
            f"{side}: {_gib(sum(parts.values()))} per device ("
            + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
            + ")"
            for side, parts in (("trainer", self.trainer), ("engine", self.engine))
        ]


def estimate(job: Job) -> Estimate:
    """Memory of one trainer device and one engine device."""
    size = BYTES[job.settings.dtype]
    tensors = job.part("physical").physical_tensors(job.config).values()
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    train, rollout = job.settings.train_devices, job.settings.rollout_devices
    engine = {"weights": parameters * size // rollout, "cache": cache_bytes(job) // rollout}
    if job.settings.reference_scorer == "engine":
        engine["reference engine"] = sum(engine.values())
    optimizer = parameters * (8 if size == 4 else 12) // train
    return Estimate(
        trainer={
            "weights": parameters * size,
            "gradients": parameters * 4,
            "optimizer": optimizer,
            "activations": _activation_bytes(job, size),
        },
        engine=engine,
    )


def cache_bytes(job: Job) -> int:
    """Keys and values of max_concurrent_samples sequences of the longest length."""
    c: Any = job.config
    per_token = 2 * c.num_kv_heads * c.head_dim * c.num_layers * c.layer_passes * BYTES[job.settings.dtype]
    return per_token * job.context_tokens * job.settings.max_concurrent_samples


def _activation_bytes(job: Job, size: int) -> int:
    c: Any = job.config
    layers = c.num_layers * c.layer_passes
    kept = c.hidden_size if job.settings.recompute else ACTIVATIONS_PER_LAYER * c.hidden_size + 4 * c.active_width
    return job.settings.tokens_per_microbatch * layers * kept * size


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
