"""OLMoE for training: a Megatron-Core module tree whose parameters carry the checkpoint's own names.

One micro-batch is a packed stream of tokens, the boundaries of its sequences, and the experts each token used in each
layer (its trace). Experts are stacked per layer; checkpoints and publications name them one by one.

Legend: T packed tokens, L layers, K experts of a token, R scored rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from adapters.megatron.attention import choose_attention
from adapters.megatron.attention_view import Attention as AttentionKernel
from adapters.megatron.moe import moe_config
from adapters.megatron.parallel import Column, current_parallelism, require, transformer_config
from adapters.megatron.root import RootModule
from adapters.megatron.routing import RouterSettings, UpdateRouting
from adapters.megatron.runtime import device
from providers.olmoe.config import OlmoeConfig
from providers.olmoe.model_layers import Body
from providers.olmoe.physical import physical_tensors
from providers.olmoe.trace import problem_of, row_shape

if TYPE_CHECKING:
    from adapters.megatron.packing import PackedBatch, TrainSample


def build(
    config: OlmoeConfig,
    *,
    dtype: torch.dtype,
    recompute: bool = False,
    sequence_parallel: bool | None = None,
    attention: AttentionKernel | None = None,
    logprob_chunk_rows: int = 2048,
    dispatcher: str | None = None,
    router: RouterSettings | None = None,
) -> Olmoe:
    """This rank's part of an OLMoE. Call after `runtime.initialize`; the weights are NaN until they are loaded.

    Args:
        config: the checkpoint's shape.
        dtype: of parameters and activations (bf16 training keeps fp32 masters in the optimizer); routers use fp32.
        recompute: keep one layer's input per layer and compute the rest again in backward.
        sequence_parallel: cut the activations between projections over the tensor-parallel ranks. None does so when
            there are several: experts need it there.
        attention: the kernel; it sees query positions and sequence boundaries. None is the one for dtype and device.
        logprob_chunk_rows: rows of logits alive at once.
        dispatcher: how tokens reach the experts of other ranks, "alltoall" or "allgather". None is "allgather" where
            experts are cut, "alltoall" elsewhere.
        router: the routers' losses, and which experts a training pass takes.

    Raises:
        ValueError: sizes that the ranks cannot share, all in one message.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    sequence_parallel = size > 1 if sequence_parallel is None else sequence_parallel
    problems = config.parallel_problems(current_parallelism(sequence=sequence_parallel))
    if size > 1 and not sequence_parallel:
        problems.append(
            f"tensor_parallel {size} needs sequence_parallel: otherwise every rank would run every token's experts"
        )
    is_cut = parallel_state.get_expert_tensor_parallel_world_size() > 1
    dispatcher = dispatcher or ("allgather" if is_cut else "alltoall")
    if is_cut and dispatcher != "allgather":
        problems.append(
            f"dispatcher {dispatcher!r} with expert_tensor_parallel > 1 gathers unlike numbers of rows, "
            "which gloo cannot do; choose allgather"
        )
    require(problems)
    shape = transformer_config(
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        **moe_config(
            num_experts=config.num_experts,
            top_k=config.top_k,
            width=config.intermediate_size,
            dispatcher=dispatcher,
            dtype=dtype,
        ),
    )
    return Olmoe(
        shape,
        config,
        recompute=recompute,
        attention=attention or choose_attention(dtype, device()),
        logprob_chunk_rows=logprob_chunk_rows,
        router=router or RouterSettings(),
    )


class Olmoe(RootModule):
    """The whole model. See `build`."""

    def __init__(
        self,
        shape: TransformerConfig,
        config: OlmoeConfig,
        *,
        recompute: bool,
        attention: AttentionKernel,
        logprob_chunk_rows: int,
        router: RouterSettings,
    ) -> None:
        super().__init__(shape)
        self.olmoe, self.logprob_chunk_rows = config, logprob_chunk_rows
        self.model = Body(shape, config, recompute=recompute, attention=attention)
        self.lm_head = Column(shape, config.hidden_size, config.vocab_size)
        self.routing = UpdateRouting(
            router, num_layers=config.num_layers, num_experts=config.num_experts, top_k=config.top_k
        )
        self.finish(physical_tensors(config), vocab_size=config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        trace: Tensor | None = None,
        rows: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: Tensor | float = 1.0,
        with_entropy: bool = False,
    ) -> Tensor:
        """Logits, or log-probs of given tokens.

        Args:
            tokens: [T] int64, the packed sequences.
            cu_seqlens: [S + 1] int, their boundaries; best on the CPU.
            trace: [T, L, K] int, the experts to take; None lets the routers choose.
            rows: [R] int64, the rows wanted; None is all. A batch without any stands for a rank without work.
            targets: [R] int64, the token that follows each row.
            temperature: one value or [R] fp32; only with targets.
            with_entropy: the rows' entropies too; only with targets.

        Returns:
            Without targets the logits [R, V / tp]; with them their log-probs [R] in fp32, or [2, R] with entropies.

        Raises:
            ValueError: the trace does not fit the tokens.
        """
        num_real = 0 if rows is not None and len(rows) == 0 else len(tokens)
        return self.read_out(
            self.states(tokens, cu_seqlens, trace, num_real=num_real),
            self.lm_head,
            rows=rows,
            targets=targets,
            temperature=temperature,
            chunk_rows=self.logprob_chunk_rows,
            with_entropy=with_entropy,
        )

    def states(
        self, tokens: Tensor, cu_seqlens: Tensor, trace: Tensor | None = None, *, num_real: int | None = None
    ) -> Tensor:
        """[T, H] what the head reads; see `forward`. The routers count the first `num_real` tokens, None is all."""
        if trace is not None:
            wanted = (len(tokens), *row_shape(self.olmoe))
            if tuple(trace.shape) != wanted:
                raise ValueError(f"experts: got shape {tuple(trace.shape)}, expected {wanted}")
            trace = trace.to(tokens.device, torch.int64)
        num_real = len(tokens) if num_real is None else num_real
        hidden, self.routing.layers = self.model(tokens, cu_seqlens, trace, self.routing.load, num_real)
        return hidden

    def check_trace(self, trace: Tensor, num_prompt_tokens: int) -> None:
        """Refuses rows of another shape, an expert that does not exist, was not recorded, or comes twice in a layer."""
        if tuple(trace.shape[1:]) != row_shape(self.olmoe):
            raise ValueError(f"experts: got rows of shape {tuple(trace.shape[1:])}, expected {row_shape(self.olmoe)}")
        if problem := problem_of(trace.cpu().numpy(), self.olmoe):
            raise ValueError(problem)

    def begin_update(
        self,
        samples: Sequence[TrainSample],
        batches: list[PackedBatch],
        run: Callable[[PackedBatch], Any],
        *,
        global_count: int,
    ) -> list[PackedBatch]:
        return self.routing.begin(samples, batches, run, global_count=global_count)

    def side_loss(self) -> Tensor | None:
        return self.routing.side_loss()

    def end_update(self) -> dict[str, float]:
        return self.routing.end()
