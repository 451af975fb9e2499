"""Reads weights back from the layout that vLLM computes with, so that a fingerprint proves what is being served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from adapters.hf_convert.blocks import Blocks
from adapters.vllm_engine.worker.packed import PackedLinear, PackedWhenUsed


def served_weight(module: torch.nn.Module, name: str) -> torch.Tensor | Blocks:
    """This worker's parameter, bitwise; packed weights as the memory that is multiplied with, if its layout is known.

    On CPU, linear weights are packed for the matrix kernels and the parameter is emptied or abandoned. Torch's packed
    tensors can be read (`patches.pack_linears_readably`). Where vLLM packed, the weight is the kernel's product with
    the identity, which is exact: every sum has one non-zero term. (There a negative zero comes back as zero;
    `BucketStore.write` sends none.)
    """
    weight = getattr(module, name)
    if _is_packed(module, name):
        if isinstance(module.cpu_linear, PackedLinear):
            return module.cpu_linear.served()
        identity = torch.eye(_input_width(module), dtype=weight.dtype)
        return module.quant_method.apply(module, identity).t()
    return weight.detach()


def served_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    """Every tensor of a model's modules by name: parameters, buffers, other attributes, and what is packed.

    A packed weight takes the place of its parameter, which nothing reads. Caches of keys and values are left out.
    """
    for path, module in model.named_modules():
        if isinstance(held := getattr(module, "cpu_linear", None), PackedWhenUsed) and held.packed is not None:
            yield f"{path}.cpu_linear", held.packed.served()
        others = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for name, tensor in {**module._parameters, **module._buffers, **others}.items():
            if tensor is None or tensor.is_meta or name == "kv_cache":
                continue
            yield f"{path}.{name}", served_weight(module, name) if _is_packed(module, name) else tensor.detach()


def _is_packed(module: torch.nn.Module, name: str) -> TypeGuard[LinearBase | ParallelLMHead]:
    is_linear = name == "weight" and isinstance(module, LinearBase | ParallelLMHead)
    return is_linear and getattr(module, name).device.type == "cpu"


def _input_width(module: LinearBase | ParallelLMHead) -> int:
    if isinstance(module, ParallelLMHead):
        return module.embedding_dim
    return getattr(module, "input_size_per_partition", module.input_size)  # a replicated layer has only the whole
