"""Ouro's layers for vLLM: the physical layers once, run up to T times, each token to its own depth.

One attention instance per (loop, layer) owns a plane of the KV cache; the weights are shared. What a scheduler step
asks of each token arrives as a `Step` from the worker; which loops follow from it is `DepthPlan`'s bookkeeping.

Shape suffixes: N tokens of the step, A tokens active in a loop, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import maybe_prefix

from adapters.vllm_engine.worker.step import Step
from providers.ouro.config import OuroConfig
from providers.ouro.decode_graphs import DecodeGraphs, is_replayable
from providers.ouro.device_exits import DeviceExits
from providers.ouro.physical import NORMS
from providers.ouro.trace import DepthPlan

Hold = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's keys and values [A, kv_heads * head_dim] -> those that go into its plane."""


class OuroAttention(nn.Module):
    """The projections of one layer. The plane of the KV cache is handed in."""

    def __init__(self, config: OuroConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.sizes = [heads // tp * config.head_dim for heads in (config.num_heads, *2 * [config.num_kv_heads])]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        self.rope = get_rope(config.head_dim, config.max_position_embeddings, rope_parameters=rope)

    def forward(
        self, x_AH: torch.Tensor, positions: torch.Tensor, plane: Attention, hold: Hold | None
    ) -> tuple[torch.Tensor, ...]:
        """-> the attention output [A, H], and the keys and values that went into the plane."""
        qkv, _ = self.qkv_proj(x_AH)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self.rope(positions, q, k)
        if hold is not None:
            k, v = hold(k, v)
        out_AH, _ = self.o_proj(plane(q, k, v))
        return out_AH, k, v


class OuroMLP(nn.Module):
    def __init__(self, config: OuroConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act = SiluAndMul()

    def forward(self, x_AH: torch.Tensor) -> torch.Tensor:
        y, _ = self.gate_up_proj(x_AH)
        y_AH, _ = self.down_proj(self.act(y))
        return y_AH


class OuroLayer(nn.Module):
    """One physical layer: norms before and after attention and feed-forward."""

    def __init__(self, config: OuroConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config, quant_config, f"{prefix}.self_attn")
        self.mlp = OuroMLP(config, quant_config, f"{prefix}.mlp")
        for name in NORMS:
            setattr(self, name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self, x_AH: torch.Tensor, positions: torch.Tensor, plane: Attention, hold: Hold | None = None
    ) -> tuple[torch.Tensor, ...]:
        """-> the new hidden state [A, H], and the keys and values that went into the plane."""
        y_AH, k, v = self.self_attn(self.input_layernorm(x_AH), positions, plane, hold)
        x_AH = x_AH + self.input_layernorm_2(y_AH)
        y_AH = self.mlp(self.post_attention_layernorm(x_AH))
        return x_AH + self.post_attention_layernorm_2(y_AH), k, v


class OuroModel(nn.Module):
    """Embedding, layers, the norm that ends every loop, the gate, and the planes of the KV cache."""

    def __init__(self, *, config: OuroConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.num_loops = config.num_loops
        quant_config = vllm_config.quant_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.layers = nn.ModuleList(
            OuroLayer(config, quant_config, maybe_prefix(prefix, f"layers.{i}")) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        tp = get_tensor_model_parallel_world_size()
        # planes[d][i]: layer i in loop d + 1. vLLM wants exactly one number in an attention layer's name.
        self.planes = nn.ModuleList(
            nn.ModuleList(
                Attention(
                    config.num_heads // tp,
                    config.head_dim,
                    config.head_dim**-0.5,
                    num_kv_heads=config.num_kv_heads // tp,
                    cache_config=vllm_config.cache_config,
                    quant_config=quant_config,
                    prefix=maybe_prefix(prefix, f"layers.{d * config.num_layers + i}.attn"),
                )
                for i in range(config.num_layers)
            )
            for d in range(config.num_loops)
        )
        self.step: Step | None = None
        self.layer_calls = self.layer_tokens = 0
        self.graphs: DecodeGraphs | None = None
        if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            kv_width = config.num_kv_heads // tp * config.head_dim
            self.graphs = DecodeGraphs(self, vllm_config, hidden_size=config.hidden_size, kv_width=kv_width)

    def run_loop(
        self, loop: int, x_AH: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """One pass through the layers -> normed state [A, H], and per layer the keys and values of the rows in keep."""
        kept = []
        for layer, plane in zip(self.layers, self.planes[loop - 1], strict=True):
            x_AH, k, v = layer(x_AH, positions, plane)
            if keep is not None:
                kept.append((k[keep], v[keep]))
        self._count(x_AH)
        return self.norm(x_AH), kept

    def exit_chance(self, h_AH: torch.Tensor) -> torch.Tensor:
        """[A] fp32 chance to leave after this loop, given that the token has not left before."""
        gate = self.early_exit_gate
        return torch.sigmoid(F.linear(h_AH.float(), gate.weight.float(), gate.bias.float())[:, 0])

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: Any = None) -> torch.Tensor:
        h_NH = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.graphs is not None and is_replayable():
            self.graphs.begin(h_NH)
            if self.step is None:
                self.graphs.capture_rest(positions)
                return self.run_whole(self.graphs, self.num_loops, positions)
            return self.replay_to_depth(self.graphs, positions, self.step)
        if self.step is None:  # memory profiling: no requests, all loops
            for loop in range(1, self.num_loops + 1):
                h_NH, _ = self.run_loop(loop, h_NH, positions, None)
            return h_NH
        return self.run_to_depth(h_NH, positions, self.step)

    def run_to_depth(self, h_NH: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """Runs each token of the step to its own depth -> its state after its last loop."""
        plan = DepthPlan(recorded=step.recorded, policies=step.policies, reach=step.reach)
        out_NH, x_AH = h_NH.clone(), h_NH[: step.size]
        survival, mass = h_NH.new_ones(step.size, dtype=torch.float32), h_NH.new_zeros(step.size, dtype=torch.float32)
        for loop in range(1, self.num_loops + 1):
            rows = plan.active
            leaving_soon = plan.may_leave(loop)
            if len(rows) < step.size:
                step.narrow(self.planes[loop - 1], rows)
                positions_A = positions[step.index(rows)]
            else:
                positions_A = positions[: step.size]
            keep = step.index(leaving_soon) if len(leaving_soon) else None
            x_AH, kept = self.run_loop(loop, x_AH, positions_A, keep)
            host_mass = None
            if plan.needs_gate:
                chance = self.exit_chance(x_AH)
                survival, mass = survival * (1 - chance), mass + survival * chance
                host_mass = mass.cpu().numpy()
            leaving = plan.finish(loop, host_mass)
            if kept:
                self.leave_behind(loop, kept, leaving[leaving_soon], rows[leaving_soon], step)
            if leaving.any():
                gone, stay = step.index(np.flatnonzero(leaving)), step.index(np.flatnonzero(~leaving))
                out_NH[step.index(rows[leaving])] = x_AH[gone]
                x_AH, survival, mass = x_AH[stay], survival[stay], mass[stay]
            if not len(plan.active):
                break
        step.finish(plan.depth)
        return out_NH

    def run_whole(self, graphs: DecodeGraphs, depth: int, positions: torch.Tensor) -> torch.Tensor:
        """Replays loops 1 .. depth of a step that all of its rows run alike -> the state after the last one."""
        for loop in range(1, depth + 1):
            hidden_NH = graphs.whole(loop, positions)
            self._count(hidden_NH)
        return hidden_NH

    def replay_to_depth(self, graphs: DecodeGraphs, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """`run_to_depth` of a captured step: rows that have left are passed over, not dropped.

        The host decides and waits for nothing: who leaves is found on the device, and all loops are replayed that
        anybody may run or, later, read the planes of.
        """
        plan = DepthPlan(recorded=step.recorded, policies=step.policies, reach=step.reach)
        depth, deepest = int(plan.depth.max()), int(step.reach.max())
        if not plan.needs_gate and (plan.depth == depth).all() and deepest <= depth:
            hidden_NH = self.run_whole(graphs, depth, positions)
            step.finish(plan.depth)
            return hidden_NH
        exits = DeviceExits(plan, positions.device)
        for loop in range(1, max(exits.deepest, deepest) + 1):
            hidden_NH = graphs.held(loop, positions)
            self._count(hidden_NH)
            chance = self.exit_chance(hidden_NH[: step.size]) if plan.needs_gate else None
            graphs.leave(exits.after(loop, chance))
        step.finish(exits.depth)
        return hidden_NH

    def _count(self, x_AH: torch.Tensor) -> None:
        self.layer_calls += len(self.layers)
        self.layer_tokens += len(self.layers) * len(x_AH)

    def leave_behind(self, loop: int, kept: list, gone: np.ndarray, rows: np.ndarray, step: Step) -> None:
        """Writes the leavers' last keys and values into every deeper plane that can still be read.

        Must happen before the next loop's attention runs: the tokens that go on read those planes.

        Args:
            kept: per layer the keys and values of the candidates.
            gone: [candidates] bool, those that really leave.
            rows: [candidates] their rows in the step.
        """
        for deeper in range(loop + 1, self.num_loops + 1):
            readable = gone & (step.reach[rows] >= deeper)
            if not readable.any():
                return
            chosen, targets = step.index(np.flatnonzero(readable)), rows[readable]
            for (k, v), plane in zip(kept, self.planes[deeper - 1], strict=True):
                step.write(plane, k[chosen], v[chosen], targets)
