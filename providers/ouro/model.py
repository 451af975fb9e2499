"""Ouro for training: a Megatron-Core module tree whose parameters carry the checkpoint's own names.

One micro-batch is a packed stream of tokens, the boundaries of its sequences, and the number of loops each token ran
(its trace). A token computes in loop d only if its depth is >= d; a deeper loop reads the keys and values of its last
loop ("last-exited"). Gradients flow through them exactly.

Legend: T packed tokens, N rows active in a loop, R scored rows, H hidden width, V vocabulary, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adapters.megatron.attention import ReplayLayout, choose_attention, replay_layout
from adapters.megatron.attention_view import Attention as AttentionKernel
from adapters.megatron.attention_view import AttentionView
from adapters.megatron.elementwise import gated, gated_halves, rotate, rotated_heads
from adapters.megatron.joined import can_join, joined
from adapters.megatron.parallel import (
    Column,
    Embedding,
    Part,
    RMSNorm,
    Row,
    Sequence,
    current_parallelism,
    pad_rows,
    require,
    transformer_config,
)
from adapters.megatron.root import RootModule
from adapters.megatron.rotary import rotary_embedding
from adapters.megatron.runtime import device
from providers.ouro.config import OuroConfig
from providers.ouro.physical import physical_tensors


def build(
    config: OuroConfig,
    *,
    dtype: torch.dtype,
    recompute: bool = False,
    sequence_parallel: bool = False,
    attention: AttentionKernel | None = None,
    logprob_chunk_rows: int = 2048,
) -> Ouro:
    """This rank's part of an Ouro. Call after `runtime.initialize`; the weights are NaN until they are loaded.

    Args:
        config: the checkpoint's shape.
        dtype: of parameters and activations (bf16 training keeps fp32 masters in the optimizer).
        recompute: keep one layer's input per (loop, layer) and compute the rest again in backward.
        sequence_parallel: cut the activations between projections over the tensor-parallel ranks.
        attention: the kernel; it sees query positions and sequence boundaries. None is the one for dtype and device.
        logprob_chunk_rows: rows of logits alive at once.

    Raises:
        ValueError: sizes that the tensor-parallel ranks cannot share, all in one message.
    """
    require(config.parallel_problems(current_parallelism(sequence=sequence_parallel)))
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
    )
    attention = attention or choose_attention(dtype, device())
    return Ouro(shape, config, recompute=recompute, attention=attention, logprob_chunk_rows=logprob_chunk_rows)


class Attention(Part):
    """Causal attention over the packed sequences, grouped-query when there are fewer key/value heads."""

    def __init__(self, shape: TransformerConfig, kernel: AttentionKernel) -> None:
        super().__init__(shape)
        self.kernel, self.head_dim = kernel, shape.kv_channels
        queries, keys = (n * shape.kv_channels for n in (shape.num_attention_heads, shape.num_query_groups))
        self.q_proj = Column(shape, shape.hidden_size, queries)
        self.k_proj = Column(shape, shape.hidden_size, keys)
        self.v_proj = Column(shape, shape.hidden_size, keys)
        self.o_proj = Row(shape, queries, shape.hidden_size)

    def forward(
        self, x: Tensor, left: tuple[Tensor, Tensor], rotary: tuple[Tensor, Tensor], view: AttentionView
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Active rows, the keys and values of rows that left, -> output, and the active rows' keys and values."""
        x = self.enter(x)[: view.num_queries]
        q, k, v = self._heads(x, rotary)
        keys, values = k, v
        if view.num_key_rows > view.num_queries:
            keys, values = torch.cat([k, left[0]]), torch.cat([v, left[1]])
        out = self.kernel(q, keys, values, view)
        if self.config.sequence_parallel:
            out = pad_rows(out, self.config.tensor_model_parallel_size)
        return self.o_proj(out), k, v

    def _heads(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values of the rows, by head."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if can_join(x, parts):
            heads, keys = (len(part.weight) // self.head_dim for part in parts[:2])
            return rotated_heads(joined(x, parts), *rotary, num_heads=heads, num_kv_heads=keys)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in parts)
        return rotate(q, *rotary), rotate(k, *rotary), v


class MLP(Part):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: TransformerConfig) -> None:
        super().__init__(shape)
        self.gate_proj = Column(shape, shape.hidden_size, shape.ffn_hidden_size)
        self.up_proj = Column(shape, shape.hidden_size, shape.ffn_hidden_size)
        self.down_proj = Row(shape, shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        parts = (self.gate_proj, self.up_proj)
        wide = gated_halves(joined(x, parts)) if can_join(x, parts) else gated(*(part(x) for part in parts))
        return self.down_proj(wide)


class Layer(Part):
    """A norm before and after each of attention and feed-forward."""

    def __init__(self, shape: TransformerConfig, kernel: AttentionKernel) -> None:
        super().__init__(shape)
        self.self_attn, self.mlp = Attention(shape, kernel), MLP(shape)
        self.input_layernorm = RMSNorm(shape, shape.hidden_size)
        self.input_layernorm_2 = RMSNorm(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape, shape.hidden_size)
        self.post_attention_layernorm_2 = RMSNorm(shape, shape.hidden_size)

    def forward(
        self,
        x: Tensor,
        left: tuple[Tensor, Tensor],
        rotary: tuple[Tensor, Tensor],
        view: AttentionView,
        num_staying: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows after this layer, and the keys and values of the rows [num_staying:] that leave after this loop."""
        out, k, v = self.self_attn(self.input_layernorm(x), left, rotary, view)
        x = x + self.input_layernorm_2(out)
        x = x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return x, k[num_staying:], v[num_staying:]


class Body(Part):
    """Embedding, the looped layers, and the norm that ends every loop."""

    def __init__(
        self, shape: TransformerConfig, config: OuroConfig, *, recompute: bool, attention: AttentionKernel
    ) -> None:
        super().__init__(shape)
        self.ouro, self.recompute, self.attention = config, recompute, attention
        self.embed_tokens = Embedding(shape, config.vocab_size)
        self.layers = Sequence(shape, (Layer(shape, attention) for _ in range(config.num_layers)))
        self.norm = RMSNorm(shape, config.hidden_size)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1, dtype=shape.params_dtype)

    def forward(self, tokens: Tensor, layout: ReplayLayout) -> Tensor:
        """[T] token ids in stream order -> [T, H], each token's state after its last loop, in stream order."""
        hidden = self.embed_tokens(tokens[layout.order])
        cos, sin = rotary_embedding(
            layout.positions, head_dim=self.ouro.head_dim, theta=self.ouro.rope_theta, dtype=hidden.dtype
        )
        empty = self._no_keys(hidden)
        left = [(empty, empty) for _ in self.layers]
        finished = []
        for loop, view in enumerate(layout.views):
            num_active, num_staying = layout.num_active[loop : loop + 2]
            rotary = cos[:num_active], sin[:num_active]
            keeps = 0 < num_staying < num_active and layout.is_left_read_after(loop)
            hidden = self._loop(hidden, left, rotary, view, num_staying, keeps=keeps)
            finished.append(hidden[num_staying:])
            hidden = hidden[:num_staying]
        return torch.cat(finished[::-1])[layout.restore]

    def _loop(
        self,
        hidden: Tensor,
        left: list[tuple[Tensor, Tensor]],
        rotary: tuple[Tensor, Tensor],
        view: AttentionView,
        num_staying: int,
        *,
        keeps: bool,
    ) -> Tensor:
        """One loop over all layers. If it keeps them, rows that leave after it are put in front of `left`, layer by
        layer."""
        parallel = self.config.sequence_parallel
        x = hidden
        if parallel:
            x = scatter_to_sequence_parallel_region(pad_rows(x, self.config.tensor_model_parallel_size))
        for index, layer in enumerate(self.layers):
            inputs = (x, left[index], rotary, view, num_staying)
            if self.recompute and torch.is_grad_enabled():
                # Non-reentrant: the reentrant kind fires a parameter's gradient hook once a loop, which breaks DDP.
                x, k, v = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, k, v = layer(*inputs)
            if keeps:
                left[index] = torch.cat([k, left[index][0]]), torch.cat([v, left[index][1]])
        x = self.norm(x)
        if parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)[: view.num_queries]
        return x

    def _no_keys(self, hidden: Tensor) -> Tensor:
        heads = self.ouro.num_kv_heads // parallel_state.get_tensor_model_parallel_world_size()
        return hidden.new_empty(0, heads, self.ouro.head_dim)


class Ouro(RootModule):
    """The whole model. See `build`."""

    trace_breakdown = "depth"

    def __init__(
        self,
        shape: TransformerConfig,
        config: OuroConfig,
        *,
        recompute: bool,
        attention: AttentionKernel,
        logprob_chunk_rows: int,
    ) -> None:
        super().__init__(shape)
        self.ouro, self.logprob_chunk_rows = config, logprob_chunk_rows
        self.model = Body(shape, config, recompute=recompute, attention=attention)
        self.lm_head = Column(shape, config.hidden_size, config.vocab_size)
        self.num_classes = config.num_loops
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
            trace: [T] int, loops of each token in 1 .. num_loops; None is full depth. Best on the CPU.
            rows: [R] int64, the rows wanted; None is all.
            targets: [R] int64, the token that follows each row.
            temperature: one value or [R] fp32; only with targets.
            with_entropy: the rows' entropies too; only with targets.

        Returns:
            Without targets the logits [R, V / tp]; with them their log-probs [R] in fp32, or [2, R] with entropies.

        Raises:
            ValueError: boundaries or trace do not fit the tokens.
        """
        return self.read_out(
            self.states(tokens, cu_seqlens, trace),
            self.lm_head,
            rows=rows,
            targets=targets,
            temperature=temperature,
            chunk_rows=self.logprob_chunk_rows,
            with_entropy=with_entropy,
        )

    def states(self, tokens: Tensor, cu_seqlens: Tensor, trace: Tensor | None = None) -> Tensor:
        """[T, H] what the head reads; see `forward`."""
        layout = replay_layout(
            cu_seqlens,
            trace,
            max_passes=self.ouro.num_loops,
            device=tokens.device,
            attention=self.model.attention,
        )
        return self.model(tokens, layout)

    def check_trace(self, trace: Tensor, num_prompt_tokens: int) -> None:
        """Refuses a loop count outside 1 .. num_loops, and a prompt token that did not run all loops."""
        loops = self.ouro.num_loops
        outside = ((trace < 1) | (trace > loops)).nonzero()[:, 0].tolist()
        shallow = (trace[:num_prompt_tokens] != loops).nonzero()[:, 0].tolist()
        if outside:
            raise ValueError(
                f"loops at position {outside[0]}: got {int(trace[outside[0]])}, expected 1 .. {loops} (total_ut_steps)"
            )
        if shallow:
            raise ValueError(
                f"loops at prompt position {shallow[0]}: got {int(trace[shallow[0]])}, expected {loops}: a prompt "
                "always runs at full depth"
            )

    def classify(self, trace: Tensor) -> Tensor:
        """Scored rows by the depth they ran: class d - 1 for depth d."""
        return trace - 1
