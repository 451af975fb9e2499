"""A training model of Ouro with one thing changed at a time: what could set it apart from an engine in bf16.

Each variant is a context in which a loaded model computes otherwise; outside of it the model is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import providers.ouro.model as ouro
from adapters.megatron import elementwise, joined, logprobs, parallel
from adapters.megatron.attention import sdpa_attention

Variant = Callable[[Any], contextlib.AbstractContextManager[None]]


def as_it_is(model: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute, put back afterwards."""
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def kernel(model: Any, attention: Any) -> Iterator[None]:
    """Another attention kernel in all layers; it reads the views' buckets."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(model.model, "attention", sdpa_attention))
        for layer in model.model.layers:
            stack.enter_context(replaced(layer.self_attn, "kernel", attention))
        yield


@contextlib.contextmanager
def dense(model: Any) -> Iterator[None]:
    """torch's scaled_dot_product_attention over padded buckets, with the kernel that torch chooses."""
    with kernel(model, sdpa_attention):
        yield


@contextlib.contextmanager
def math_attention(model: Any) -> Iterator[None]:
    """The same with torch's plain products and softmax, in fp32 inside."""
    with kernel(model, sdpa_attention), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@contextlib.contextmanager
def wide_attention(model: Any) -> Iterator[None]:
    """Attention in fp32 of bf16 queries, keys and values, rounded once: an attention without rounding of its own."""

    def attend(q: Tensor, k: Tensor, v: Tensor, view: Any) -> Tensor:
        return sdpa_attention(q.float(), k.float(), v.float(), view).to(q.dtype)

    with kernel(model, attend):
        yield


def rows_at_a_time(rows: int) -> Variant:
    """Every product over so many rows at once: a decode step of as many requests."""

    @contextlib.contextmanager
    def variant(model: Any) -> Iterator[None]:
        def product(self: Any, x: Tensor) -> Tensor:
            return torch.cat([F.linear(part, self.weight) for part in x.split(rows)])

        with (
            replaced(ouro, "can_join", lambda x, parts: False),
            replaced(parallel.Column, "forward", product),
            replaced(parallel.Row, "forward", product),
        ):
            yield

    return variant


@contextlib.contextmanager
def separate_products(model: Any) -> Iterator[None]:
    """A product for each projection, where the trainer and the engine have one for queries, keys and values."""
    with replaced(ouro, "can_join", lambda x, parts: False):
        yield


@contextlib.contextmanager
def torch_operations(model: Any) -> Iterator[None]:
    """Norms, rotation, gates and log-probs in torch's own operations instead of one kernel each."""
    with contextlib.ExitStack() as stack:
        for module in (elementwise, joined, logprobs, parallel):
            stack.enter_context(replaced(module, "is_fused", lambda x: False))
        yield


@contextlib.contextmanager
def norm_rounded_twice(model: Any) -> Iterator[None]:
    """The norm rounded before its weight too, as transformers does, where the trainer and vLLM round once on CUDA."""

    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    with replaced(parallel.RMSNorm, "forward", forward):
        yield


@contextlib.contextmanager
def rotary_table_in_fp32(model: Any) -> Iterator[None]:
    """All digits of cosines and sines, where the trainer and vLLM round them to the model's dtype."""
    original = ouro.rotary_embedding

    def whole(*arguments: Any, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
        return original(*arguments, dtype=torch.float32, **options)

    with replaced(ouro, "rotary_embedding", whole):
        yield


@contextlib.contextmanager
def rotary_in_bf16(model: Any) -> Iterator[None]:
    """The same table, and the rotation in bf16: each product rounded, and their sum."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half].to(x.dtype), sin[..., :half].to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    with torch_operations(model), replaced(ouro, "rotate", rotate):
        yield


@contextlib.contextmanager
def head_in_fp32(model: Any) -> Iterator[None]:
    """Logits that are never rounded to bf16: what their rounding does to log-probs."""

    def forward(x: Tensor) -> Tensor:
        return F.linear(x.float(), model.lm_head.weight.float())

    with replaced(logprobs, "is_fused", lambda x: False), replaced(model.lm_head, "forward", forward):
        yield
