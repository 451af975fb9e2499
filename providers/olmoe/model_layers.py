"""The layers of OLMoE's training model: attention, experts, and the body that runs them over a packed stream.

Legend: T packed tokens, L layers, K experts of a token, H hidden width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from adapters.megatron.attention import replay_layout
from adapters.megatron.attention_view import Attention as AttentionKernel
from adapters.megatron.attention_view import AttentionView
from adapters.megatron.elementwise import rotate
from adapters.megatron.moe import MoE, Routed
from adapters.megatron.parallel import Column, Embedding, Part, RMSNorm, Row, SplitRMSNorm, pad_rows
from adapters.megatron.parallel import Sequence as Layers
from adapters.megatron.rotary import rotary_embedding
from providers.olmoe.config import OlmoeConfig


class Attention(Part):
    """Causal attention over the packed sequences. Queries and keys are normed over their whole projection."""

    def __init__(self, shape: TransformerConfig, kernel: AttentionKernel, clip: float | None) -> None:
        super().__init__(shape)
        self.kernel, self.head_dim, self.clip = kernel, shape.kv_channels, clip
        queries, keys = (n * shape.kv_channels for n in (shape.num_attention_heads, shape.num_query_groups))
        self.q_proj = Column(shape, shape.hidden_size, queries)
        self.k_proj = Column(shape, shape.hidden_size, keys)
        self.v_proj = Column(shape, shape.hidden_size, keys)
        self.o_proj = Row(shape, queries, shape.hidden_size)
        self.q_norm, self.k_norm = SplitRMSNorm(shape, queries), SplitRMSNorm(shape, keys)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], view: AttentionView) -> Tensor:
        whole = self.enter(x)
        real = whole[: view.num_queries]
        q, k, v = self.q_norm(self.q_proj(real)), self.k_norm(self.k_proj(real)), self.v_proj(real)
        if self.clip is not None:
            q, k, v = (each.clamp(-self.clip, self.clip) for each in (q, k, v))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        out = self.kernel(rotate(q, *rotary), rotate(k, *rotary), v, view)
        return self.o_proj(F.pad(out, (0, 0, 0, len(whole) - len(out))))


class Layer(Part):
    """Attention and experts, each behind a norm."""

    def __init__(self, shape: TransformerConfig, kernel: AttentionKernel, clip: float | None) -> None:
        super().__init__(shape)
        self.self_attn, self.mlp = Attention(shape, kernel, clip), MoE(shape)
        self.input_layernorm = RMSNorm(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape, shape.hidden_size)

    def forward(
        self,
        x: Tensor,
        experts: Tensor | None,
        load: Tensor,
        num_real: int,
        rotary: tuple[Tensor, Tensor],
        view: AttentionView,
    ) -> tuple[Tensor, Routed]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, view)
        out, routed = self.mlp(self.post_attention_layernorm(x), experts, load, num_real)
        return x + out, routed


class Body(Part):
    """Embedding, layers and the last norm."""

    def __init__(
        self, shape: TransformerConfig, config: OlmoeConfig, *, recompute: bool, attention: AttentionKernel
    ) -> None:
        super().__init__(shape)
        self.olmoe, self.recompute, self.attention = config, recompute, attention
        self.embed_tokens = Embedding(shape, config.vocab_size)
        self.layers = Layers(shape, (Layer(shape, attention, config.clip_qkv) for _ in range(config.num_layers)))
        self.norm = RMSNorm(shape, config.hidden_size)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor, trace: Tensor | None, load: Tensor, num_real: int
    ) -> tuple[Tensor, list[Routed]]:
        """[T] token ids and [T, L, K] experts -> [T, H] and what each layer's router did with this rank's tokens."""
        layout = replay_layout(cu_seqlens, None, max_passes=1, device=tokens.device, attention=self.attention)
        x, start = self._enter(self.embed_tokens(tokens))
        rotary = rotary_embedding(
            layout.positions, head_dim=self.olmoe.head_dim, theta=self.olmoe.rope_theta, dtype=x.dtype
        )
        own_real = min(max(num_real - start, 0), len(x))
        experts = None if trace is None else self._own_experts(trace, start, len(x))
        routed = []
        for index, layer in enumerate(self.layers):
            chosen = None if experts is None else experts[:, index]
            inputs = (x, chosen, load[index], own_real, rotary, layout.views[0])
            if self.recompute and torch.is_grad_enabled():
                x, each = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, each = layer(*inputs)
            routed.append(each)
        x = self.norm(x)
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
        return x[: len(tokens)], routed

    def _enter(self, hidden: Tensor) -> tuple[Tensor, int]:
        """This rank's rows of the padded stream, and the place of the first of them."""
        hidden = pad_rows(hidden, self.config.tensor_model_parallel_size)
        if self.config.moe_token_dispatcher_type == "allgather":
            rows = torch.tensor(len(hidden), device=hidden.device)
            dist.all_reduce(rows, dist.ReduceOp.MAX, group=parallel_state.get_expert_tensor_and_model_parallel_group())
            hidden = F.pad(hidden, (0, 0, 0, int(rows) - len(hidden)))
        if not self.config.sequence_parallel:
            return hidden, 0
        own = scatter_to_sequence_parallel_region(hidden)
        return own, parallel_state.get_tensor_model_parallel_rank() * len(own)

    def _own_experts(self, trace: Tensor, start: int, count: int) -> Tensor:
        """The trace of this rank's rows; padding takes the first experts, which changes nothing that is read."""
        padding = torch.arange(self.olmoe.top_k, device=trace.device).expand(count, self.olmoe.num_layers, -1)
        return torch.cat([trace[start : start + count], padding])[:count]
