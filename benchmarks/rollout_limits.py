"""What a rollout must at least read and compute, and the memory of its keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.rollout_cases import PROMPT, RESPONSE, config_of


def cache_bytes(model: Path, most: int) -> int:
    """Keys and values of `most` requests, with room for their last blocks."""
    config = config_of(model)
    return most * (PROMPT + RESPONSE + 32) * token_bytes(config) * loops_of(config)


def token_bytes(config: Any) -> int:
    """Keys and values of one token in one loop."""
    return 2 * config.num_kv_heads * config.head_dim * config.num_layers * element_bytes(config)


def element_bytes(config: Any) -> int:
    return 2 if config.dtype == "bfloat16" else 4


def loops_of(config: Any) -> int:
    """How often a token runs each layer at most: 1 of a model without loops."""
    return getattr(config, "num_loops", 1)


def experts_read(config: Any, count: int) -> float | None:
    """How many experts of a layer `count` tokens choose together, if each expert is as likely as another.

    One token leaves an expert out with probability 1 - top_k / num_experts. None of a model without experts.
    """
    if not getattr(config, "num_experts", 0):
        return None
    return config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** count)


def layer_parameters(config: Any, experts: float | None) -> float:
    """Of one layer's products: attention, and the feed-forward part or the router and so many experts."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = 3 * config.hidden_size * config.intermediate_size
    feed = wide if experts is None else experts * wide + config.num_experts * config.hidden_size
    return 2 * config.hidden_size * (queries + keys) + feed


def limit(row: dict[str, Any], config: Any, machine: dict[str, float]) -> float:
    """Tokens per second if nothing but the needed bytes were moved, and the prompts' products made at full rate.

    A decode step reads every layer's weights once a loop (of experts, those that its tokens are expected to choose),
    the head, and the keys and values of each loop. A prompt's last row alone goes through the head.

    Args:
        row: `requests`, `response` and `depth_mean`, the mean loops of a generated token.
        machine: of `limits.measure`.
    """
    count, response, loops = row["requests"], row["response"], row["depth_mean"]
    layers, head = config.num_layers, config.vocab_size * config.hidden_size
    read = layers * layer_parameters(config, experts_read(config, count))
    run = layers * layer_parameters(config, getattr(config, "top_k", None))
    weights = (loops * read + head) * element_bytes(config) * response
    cache = count * response * (PROMPT + response / 2) * token_bytes(config) * loops
    prefill = 2 * (loops_of(config) * run * PROMPT + head) * count
    seconds = (weights + cache) / machine["bytes_per_second"] + prefill / machine["flops_per_second"]
    return count * response / seconds
