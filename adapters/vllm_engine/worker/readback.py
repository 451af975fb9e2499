"""Reads weights back from the layout that vLLM computes with, so that a fingerprint proves what is being served."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from adapters.hf_convert.blocks import Blocks
from adapters.vllm_engine.worker.packed import PackedLinear


def served_weight(module: torch.nn.Module, name: str) -> torch.Tensor | Blocks:
    """This worker's parameter, bitwise; packed weights as the memory that is multiplied with, if its layout is known.

    On CPU, linear weights are packed for the matrix kernels and the parameter is emptied or abandoned. Torch's packed
    tensors can be read (`patches.pack_linears_readably`). Where vLLM packed, the weight is the kernel's product with
    the identity, which is exact: every sum has one non-zero term. (There a negative zero comes back as zero;
    `BucketStore.write` sends none.)
    """
    weight = getattr(module, name)
    if name == "weight" and weight.device.type == "cpu" and isinstance(module, LinearBase | ParallelLMHead):
        if isinstance(module.cpu_linear, PackedLinear):
            return module.cpu_linear.served()
        identity = torch.eye(_input_width(module), dtype=weight.dtype)
        return module.quant_method.apply(module, identity).t()
    return weight.detach()


def _input_width(module: LinearBase | ParallelLMHead) -> int:
    if isinstance(module, ParallelLMHead):
        return module.embedding_dim
    return getattr(module, "input_size_per_partition", module.input_size)  # a replicated layer has only the whole
