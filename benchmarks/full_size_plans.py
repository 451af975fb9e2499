"""What `benchmarks.full_size` runs at each shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EARLY = "early:0.8:2:4"
"""A random gate leaves with a chance of about one half per loop: this threshold mixes depths 2, 3 and 4."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One shape."""

    model: str
    recipe: dict[str, Any]
    """Settings of the run."""
    stops: tuple[int, ...]
    """Updates after whose checkpoint a process is killed, the last one at the end of the run."""
    one_slot: dict[str, Any] | None = None
    """Settings of the two short runs that must be bitwise equal; None where their state does not fit the disk."""
    num_prompts: int = 64
    prompt_tokens: int = 128
    verify: tuple[str, ...] = ()
    """Further arguments of `python -m tether.convert verify`."""
    disk_bytes: int = 1 << 30
    """Room that the folder must have."""
    processes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes", int(self.recipe.get("train_devices", 1)))


_COMMON = {
    "reward": "benchmarks.shapes:even_share",
    "recompute": True,
    "keep_last": 1,
    "save_start": False,
    "remote_code": "ours",
}
_OURO = {
    **_COMMON,
    "depth": f"cycle:3,4,2,3,{EARLY},{EARLY}",
    "save_every": 3,
    "save_format": "same_layout",
    "diagnose": True,
}
_ONE_SLOT = {
    **_COMMON,
    "depth": f"cycle:3,{EARLY}",
    "max_concurrent_samples": 1,
    "prompts_per_update": 2,
    "group_size": 2,
    "max_new_tokens": 16,
    "save_every": 1,
    "save_format": "same_layout",
    "keep_last": 2,
}
_ON_H200 = {
    "prompts_per_update": 16,
    "group_size": 4,
    "max_new_tokens": 128,
    "tokens_per_microbatch": 8192,
    "staging": "ipc",
    "deadline_seconds": 300,
}
_OLMOE = {**_COMMON, "remote_code": "keep", "save_every": 0, "diagnose": True}
_OLMOE_ON_H200 = {**_OLMOE, **_ON_H200, "peak_flops": 782e12}
_EP2 = {"train_devices": 2, "expert_parallel": 2}
_TINY = {"prompts_per_update": 4, "group_size": 2, "max_new_tokens": 16, "tokens_per_microbatch": 512}
_TWO_UPDATES: dict[str, Any] = {"stops": (2,), "verify": ("--files-only",)}

PLANS: dict[str, Plan] = {
    "ouro-1.4b": Plan(
        model="ouro-1.4b",
        # 64 sequences of 256 tokens, 4 loops of 24 layers: 12.9 GB of keys and values
        recipe={**_OURO, **_ON_H200, "kv_cache_bytes": 14_000_000_000, "peak_flops": 782e12},
        stops=(3, 6),
        one_slot={**_ON_H200, **_ONE_SLOT, "kv_cache_bytes": 1_000_000_000},
        disk_bytes=50 << 30,
    ),
    "olmoe-1b-7b": Plan(
        model="olmoe-1b-7b",
        # 124.5 GB of weights, gradients, masters and moments, and the engine's 13.8 GB of weights and 2.2 GB of keys
        # and values (64 sequences of 256 tokens): versions wait in host memory, and micro-batches are small.
        recipe={
            **_OLMOE_ON_H200,
            "tokens_per_microbatch": 2048,
            "staging": "host",
            "kv_cache_bytes": 2_200_000_000,
        },
        **_TWO_UPDATES,
        disk_bytes=32 << 30,
    ),
    "olmoe-1b-7b-ep2": Plan(
        model="olmoe-1b-7b",
        # Each card: its half of the experts, 58 GB with gradients, masters and moments, and 6 GB of the rest; the first
        # one the engine too: 14 GB, two staged versions of 14 GB, 3 GB of keys and values.
        recipe={**_OLMOE_ON_H200, **_EP2, "kv_cache_bytes": 3_000_000_000},
        **_TWO_UPDATES,
        disk_bytes=32 << 30,
    ),
    "tiny-ouro": Plan(
        model="tiny-ouro",
        recipe={**_OURO, **_TINY},
        stops=(3, 6),
        one_slot={**_TINY, **_ONE_SLOT},
        num_prompts=24,
        prompt_tokens=16,
    ),
    "tiny-olmoe": Plan(
        model="tiny-olmoe",
        recipe={**_OLMOE, **_TINY},
        **_TWO_UPDATES,
        num_prompts=24,
        prompt_tokens=16,
    ),
    "tiny-olmoe-ep2": Plan(
        model="tiny-olmoe",
        recipe={**_OLMOE, **_TINY, **_EP2},
        **_TWO_UPDATES,
        num_prompts=24,
        prompt_tokens=16,
    ),
}
