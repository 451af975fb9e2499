"""Megatron-Core's parallel parts under the checkpoint's own names, and the container and root to hang them in.

A provider builds its tree from these so that a parameter's name, its checkpoint key and its Hugging Face name are one.
Legend: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from adapters.megatron.runtime import device
from adapters.physical import PhysicalTensor


def transformer_config(*, dtype: torch.dtype, sequence_parallel: bool = False, **shape: Any) -> TransformerConfig:
    """A TransformerConfig for this process's parallel groups, without dropout and without fused kernels.

    Weights are left uninitialised: `RootModule.finish` fills them with NaN, and they come from a checkpoint. The loss
    is summed and divided by the global token count once (calculate_per_token_loss).

    Raises:
        ValueError: sequence parallelism without tensor parallelism.
    """
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    if sequence_parallel and tensor_parallel == 1:
        raise ValueError("sequence_parallel: got True with tensor_parallel 1, expected tensor_parallel > 1")
    return TransformerConfig(
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


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
        _mark_cut(self.weight, 0)

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
        _mark_cut(self.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Embedding(VocabParallelEmbedding):
    """[T] token ids -> [T, hidden], the vocabulary cut over ranks."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__(vocab_size, config.hidden_size, init_method=config.init_method, config=config)
        _mark_cut(self.weight, 0)


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


class RootModule(MegatronModule):
    """The root of a provider's tree: what Megatron's schedule, DDP and checkpoints and our Trainer ask of a model.

    A provider calls `finish` at the end of its constructor and implements `forward(tokens, cu_seqlens, trace=None,
    rows=None, targets=None, temperature=1.0)`.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False
    trace_breakdown: ClassVar[str | None] = None
    """If set, what `classify` sorts scored tokens by ("depth"); the trainer then reports score differences by it."""
    num_classes: int = 0
    """How many classes there are."""

    physical: Mapping[str, PhysicalTensor]
    vocab_size: int

    def finish(self, table: Mapping[str, PhysicalTensor], *, vocab_size: int) -> None:
        """Checks the parameters against the table, freezes what it says, and fills them with NaN until they are loaded.

        Raises:
            RuntimeError: a name or a shape differs; this is a fault of the provider.
        """
        self.physical, self.vocab_size = dict(table), vocab_size
        self.to(device())
        size = parallel_state.get_tensor_model_parallel_world_size()
        want = {name: local_shape(tensor, size) for name, tensor in table.items()}
        have = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        if wrong := sorted(n for n in want.keys() | have.keys() if want.get(n) != have.get(n)):
            lines = [f"{n}: parameter {have.get(n)}, table {want.get(n)}" for n in wrong[:10]]
            raise RuntimeError(f"{len(wrong)} parameter(s) differ from the physical table: " + "; ".join(lines))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not table[name].frozen)
            parameter.data.fill_(float("nan"))

    def check_trace(self, trace: Tensor, num_prompt_tokens: int) -> None:
        """Raises ValueError, with the position, if a sample's trace cannot be replayed."""

    def classify(self, trace: Tensor) -> Tensor:
        """Rows of a trace -> the class of each, in 0 .. num_classes - 1."""
        raise NotImplementedError

    def set_input_tensor(self, _tensor: Any) -> None:
        """Part of Megatron's pipeline protocol; there is one stage."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return super().sharded_state_dict(prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata))


def local_shape(tensor: PhysicalTensor, size: int) -> tuple[int, ...]:
    """The shape of one rank's part when `size` ranks share the tensor."""
    return tuple(n // size if dim == tensor.partition_dim else n for dim, n in enumerate(tensor.shape))


def gather_whole(part: Tensor, partition_dim: int | None) -> Tensor:
    """A tensor cut over the tensor-parallel ranks, whole on each. Every one of them must call it, in the same order."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or partition_dim is None:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, partition_dim)


def _mark_cut(weight: nn.Parameter, dim: int) -> None:
    """What Megatron's own initialisation would have set; without it the gradient norm counts a shard as a replica."""
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Zero rows at the end up to a multiple: sequence parallelism cuts the rows evenly."""
    extra = -x.shape[0] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, extra)) if extra else x
