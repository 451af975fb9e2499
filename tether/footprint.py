"""How many bytes a trainer process and an engine process take of their device, part by part.

Countable parts (weights, gradients, masters, moments, keys and values) are exact up to the padding of buffers. The rest
is what dominates; docs/memory.md has both beside measured peaks. Needs neither torch nor an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from adapters.physical import PhysicalTensor
from tether.settings import Settings

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_ROWS = 2048
"""Rows of logits alive at once (`logprob_chunk_rows` of a provider's build)."""
LOGIT_BYTES, ENTROPY_BYTES, FUSED_LOGIT_BYTES = 8, 24, 2
"""Of one logit in the chunk whose log-probs are computed, without and with its entropy: counted from the operations.
The fused kernel reads the logits as they are and overwrites them with their gradients."""
CONTEXT_BYTES = 600 << 20
"""A CUDA context with cuBLAS workspaces, of each process."""
STEP_TOKENS = 2048
"""Tokens of one engine step (`EngineSettings.max_num_batched_tokens`)."""
BUCKET_BYTES = 256 << 20
"""Of a published version, written together (`memory.buckets.BUCKET_BYTES`)."""
GRAPH_BYTES = 4 << 20
"""Of one captured graph; a looped model has three for each loop and batch size."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the bytes follow from."""

    config: Any
    """The provider's config."""
    table: Mapping[str, PhysicalTensor]
    """The physical tensors."""
    settings: Settings
    """With dtype resolved."""
    context_tokens: int
    """Longest sequence, prompt and response together."""

    @property
    def element(self) -> int:
        return BYTES[self.settings.dtype]

    @property
    def fused(self) -> bool:
        """Whether the trainer's fused kernels run: half precision is taken to be trained on CUDA."""
        return self.element == 2


def trainer(shape: Shape) -> dict[str, int]:
    """Bytes of one trainer process by purpose; of the first one, which publishes."""
    return {
        **state(shape),
        "kept activations": activations(shape),
        "widest moment": max(backward(shape), logprobs(shape), gathers(shape)),
        **({"staged weights": 2 * _staged(shape)} if shape.settings.staging == "ipc" else {}),
    }


def state(shape: Shape) -> dict[str, int]:
    """Weights, gradients in fp32, and the optimizer's part: masters (not in fp32 training) and two moments."""
    s = shape.settings
    tp, experts_over = s.tensor_parallel, s.expert_parallel * s.expert_tensor_parallel
    every, trained = _counts(shape, trained_only=False), _counts(shape, trained_only=True)
    sharers = (s.train_devices // tp, s.train_devices // experts_over) if s.distributed_optimizer else (1, 1)
    per_value = 8 if shape.element == 4 else 12
    return {
        "weights": sum(every) * shape.element,
        "gradients": sum(trained) * 4,
        "masters and moments": sum(-(-count * per_value // over) for count, over in zip(trained, sharers, strict=True)),
    }


def activations(shape: Shape) -> int:
    """What a full micro-batch at full depth keeps for its backward pass."""
    c, s = shape.config, shape.settings
    state = c.hidden_size * shape.element
    each = state // _between(shape) if s.recompute else _layer(shape)
    norm = 2 * shape.element if shape.fused else 4 + 2 * shape.element
    ends = c.layer_passes * c.hidden_size * norm + 4 * state  # norms of the passes, in and out
    return s.tokens_per_microbatch * (c.num_layers * c.layer_passes * each + ends)


def backward(shape: Shape) -> int:
    """What its backward pass needs beside that; with recompute also one layer's activations."""
    s = shape.settings
    beside = shape.config.backward_bytes(recompute=s.recompute, fused=shape.fused) * shape.element // 2
    return s.tokens_per_microbatch * (beside + (_layer(shape) if s.recompute else 0))


def logprobs(shape: Shape) -> int:
    """The logits of one chunk, and the gradient of the head's weight."""
    c: Any = shape.config
    s = shape.settings
    each = FUSED_LOGIT_BYTES if shape.fused else ENTROPY_BYTES if s.entropy_bonus else LOGIT_BYTES
    rows = min(CHUNK_ROWS, s.tokens_per_microbatch)
    return c.vocab_size // s.tensor_parallel * (rows * each + c.hidden_size * shape.element)


def gathers(shape: Shape) -> int:
    """What a publication puts together from several processes, and the buckets that it passes through.

    Of tensors the largest: its parts, the whole, and the one before, which waits for its bucket to be full. Of experts
    seven [E, I, H]: parts and whole of a layer's gate and up, and all three projections of the layer before. A version
    that will wait elsewhere than in the trainer's memory is written by way of two buckets there.
    """
    c, s = shape.config, shape.settings
    whole = 3 * max(prod(t.shape) for t in shape.table.values()) if s.tensor_parallel > 1 else 0
    if s.expert_parallel * s.expert_tensor_parallel > 1:
        whole = max(whole, 7 * c.num_experts * c.intermediate_size * c.hidden_size)
    buckets = 0 if s.staging == "ipc" else min(2 * BUCKET_BYTES, _staged(shape))
    return whole * shape.element + buckets


def _layer(shape: Shape) -> int:
    """What one run of one layer keeps of a token."""
    whole, cut = shape.config.kept_bytes(shape.element, fused=shape.fused)
    return whole // _between(shape) + cut // shape.settings.tensor_parallel


def _between(shape: Shape) -> int:
    """Processes that divide activations between projections; models with experts always do."""
    s, has_experts = shape.settings, bool(getattr(shape.config, "num_experts", 0))
    return s.tensor_parallel if s.sequence_parallel or has_experts else 1


def engine(shape: Shape) -> dict[str, int]:
    """Bytes of one engine process on one of its devices; kv_cache_bytes=0 counts what max_concurrent_samples need."""
    c, s = shape.config, shape.settings
    size, over = shape.element, s.rollout_devices
    cache = s.kv_cache_bytes or cache_bytes(shape)
    widest = 3 * max(c.active_width, c.hidden_size) * size * STEP_TOKENS // over
    sampled = s.max_concurrent_samples * c.vocab_size * (size + 3 * 4)
    parts = {
        "weights": _count(shape) * size // over,
        "keys and values": cache if s.kv_cache_bytes else cache // over,
        "activations": widest + sampled,
    }
    if not s.enforce_eager:
        parts["graphs"] = GRAPH_BYTES * num_graphs(shape)
    if s.staging == "shadow":
        parts["staged weights"] = _count(shape) * size // over
    return parts


def num_graphs(shape: Shape) -> int:
    """Captured graphs of decode steps."""
    passes = shape.config.layer_passes
    sizes = 4 + max(0, shape.settings.max_concurrent_samples - 8) // 16
    return sizes * (3 * passes if passes > 1 else 1)


def cache_bytes(shape: Shape) -> int:
    """Keys and values of max_concurrent_samples sequences of the longest length, on all devices together."""
    c: Any = shape.config
    per_token = 2 * c.num_kv_heads * c.head_dim * c.num_layers * c.layer_passes * shape.element
    return per_token * shape.context_tokens * shape.settings.max_concurrent_samples


def _counts(shape: Shape, *, trained_only: bool) -> tuple[int, int]:
    """Values that one process holds: of the tensors that tensor parallelism divides, and of experts."""
    s, dense, experts = shape.settings, 0, 0
    for name, tensor in shape.table.items():
        if trained_only and (tensor.frozen or any(fnmatchcase(name, p) for p in s.freeze.split(",") if p)):
            continue
        if ".experts." in name:  # of every model with experts: they are named one by one
            experts += prod(tensor.shape)
        else:
            dense += prod(tensor.shape) // (1 if tensor.partition_dim is None else s.tensor_parallel)
    return dense, experts // (s.expert_parallel * s.expert_tensor_parallel)


def _count(shape: Shape) -> int:
    return sum(prod(tensor.shape) for tensor in shape.table.values())


def _staged(shape: Shape) -> int:
    return _count(shape) * shape.element
