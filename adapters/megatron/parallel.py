"""Megatron-Core's parallel parts under the checkpoint's own names, and the container to hang them in.

A provider builds its tree from these so that a parameter's name, its checkpoint key and its Hugging Face name are one.
Legend: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from adapters.megatron.elementwise import is_fused, rms_norm, weighted
from adapters.parallelism import Parallelism


def current_parallelism(*, sequence: bool) -> Parallelism:
    """What this process's parallel groups amount to."""
    return Parallelism(
        devices=torch.distributed.get_world_size(),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence=sequence,
    )


def require(problems: list[str]) -> None:
    """Raises ValueError with all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))


def transformer_config(*, dtype: torch.dtype, sequence_parallel: bool = False, **shape: Any) -> TransformerConfig:
    """A TransformerConfig for this process's parallel groups, without dropout and without fused kernels.

    Weights are left uninitialised: `RootModule.finish` fills them with NaN, and they come from a checkpoint. The loss
    is summed and divided by the global token count once (calculate_per_token_loss).
    """
    return TransformerConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **shape,
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 and rounded to x's dtype before the weight, as the checkpoints' own code does."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.empty(width, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads sums such gradients over TP

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SplitRMSNorm(nn.Module):
    """RMSNorm over the whole output of a Column, of which each tensor-parallel rank has a slice of `width`."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        size = config.tensor_model_parallel_size
        self.eps, self.width = config.layernorm_epsilon, width
        self.weight = nn.Parameter(torch.empty(width // size, dtype=config.params_dtype))
        mark_cut(self.weight, 0)

    def forward(self, x: Tensor) -> Tensor:
        if is_fused(x) and len(self.weight) == self.width:
            return rms_norm(x, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Summed over the ranks in forward, and its gradient in backward: every slice is scaled by the one sum.
        squares = reduce_from_tensor_model_parallel_region(wide.pow(2).sum(-1, keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)
        return weighted(wide * torch.rsqrt(squares / self.width + self.eps), self.weight, x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Without it Megatron would save a slice as if it were a replica."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class Column(ColumnParallelLinear):
    """[T, I] whole on every rank -> [T, O / tp]. The caller reduces the input's gradient, once for all parts (`enter`).

    No `_extra_state`: without the override every state dict would carry a key that is no tensor of the checkpoint.
    """

    get_extra_state = nn.Module.get_extra_state

    def __init__(self, config: TransformerConfig, width_in: int, width_out: int) -> None:
        super().__init__(
            width_in,
            width_out,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            disable_grad_reduce=True,
        )
        self.sequence_parallel = False  # `enter` has gathered
        mark_cut(self.weight, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Row(RowParallelLinear):
    """[T, I / tp] -> [T, O] summed over ranks (or [T / tp, O] under sequence parallelism)."""

    get_extra_state = nn.Module.get_extra_state

    def __init__(self, config: TransformerConfig, width_in: int, width_out: int) -> None:
        super().__init__(
            width_in,
            width_out,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        mark_cut(self.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Embedding(VocabParallelEmbedding):
    """[T] token ids -> [T, hidden], the vocabulary cut over ranks."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__(vocab_size, config.hidden_size, init_method=config.init_method, config=config)
        mark_cut(self.weight, 0)


class Part(MegatronModule):
    """A module whose Columns share one input."""

    def enter(self, x: Tensor) -> Tensor:
        """The input for all Columns of this part: whole on every rank, its gradient reduced once in backward."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(x)


class Sequence(MegatronModule):
    """Modules named 0, 1, 2, ... In a plain ModuleList Megatron would save tensor-parallel shards as if replicated."""

    def __init__(self, config: TransformerConfig, modules: Iterable[nn.Module]) -> None:
        super().__init__(config)
        for index, module in enumerate(modules):
            self.add_module(str(index), module)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())


def mark_cut(weight: nn.Parameter, dim: int) -> None:
    """What Megatron's own initialisation would have set; without it the gradient norm counts a slice as a replica."""
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Zero rows at the end up to a multiple: sequence parallelism cuts the rows evenly."""
    extra = -x.shape[0] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, extra)) if extra else x
