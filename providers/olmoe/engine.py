"""OLMoE for vLLM: vLLM's own model, with its routing recorded and replayed, and its weights checked and read back.

vLLM's layers compute; what is added is what its model leaves out (`clip_qkv`, the checkpoint's epsilon), names that are
refused instead of skipped, and what Tether's worker calls (`TracedModel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.olmoe import OlmoeAttention
from vllm.model_executor.models.olmoe import OlmoeForCausalLM as VllmOlmoe

from adapters.hf_convert.names import name_problems
from adapters.vllm_engine.worker.experts import ExpertRouting, served_experts
from adapters.vllm_engine.worker.model_interface import LiveTensor, Policy, TraceLayout
from adapters.vllm_engine.worker.readback import served_weight
from adapters.vllm_engine.worker.step import Step
from providers.olmoe.config import OlmoeConfig
from providers.olmoe.physical import physical_tensors
from providers.olmoe.trace import KIND, parse_policy, row_shape

QKV = ("q_proj", "k_proj", "v_proj")


def register() -> None:
    """Makes vLLM build this class for OLMoE checkpoints in this process. Idempotent."""
    ModelRegistry.register_model("OlmoeForCausalLM", OlmoeForCausalLM)


class ClippedAttention(OlmoeAttention):
    """vLLM's attention, which ignores `clip_qkv`, with queries, keys and values clamped after the norm."""

    clip: float

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self._apply_qk_norm(q, k)
        q, k, v = (each.clamp(-self.clip, self.clip) for each in (q, k, v))
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class OlmoeForCausalLM(VllmOlmoe):
    """What vLLM's loader and runner call, and what Tether's worker calls."""

    policy_width = 1

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.olmoe = OlmoeConfig.from_hf(vllm_config.model_config.hf_config.to_dict())
        self.trace_layout = TraceLayout(
            kind=KIND, least=0, most=self.olmoe.num_experts - 1, row_shape=row_shape(self.olmoe)
        )
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.variance_epsilon = self.olmoe.rms_norm_eps  # vLLM's model has 1e-5 built in
            if isinstance(module, OlmoeAttention) and self.olmoe.clip_qkv is not None:
                module.__class__, module.clip = ClippedAttention, self.olmoe.clip_qkv
        self.step: Step | None = None
        self.layer_calls = self.layer_tokens = 0
        self._vllm_config = vllm_config
        self._routing: ExpertRouting | None = None
        self._captured: Callable[..., Any] = super().forward
        if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self._captured = CUDAGraphWrapper(super().forward, vllm_config, CUDAGraphMode.FULL)

    def parse_policy(self, text: str | None) -> Policy:
        parse_policy(text or "full", self.olmoe)
        return Policy(vector=(0.0,), reach=0)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        step, inputs = self.step, (input_ids, positions, intermediate_tensors, inputs_embeds)
        if self._routing is None:  # before anything is captured: what it writes belongs to the graph
            self._routing = ExpertRouting(self, self._vllm_config)
        if step is None:  # memory profiling or a capture: no requests
            return self._captured(*inputs)
        self._routing.begin(step, self.trace_layout.unknown)
        # A graph takes the experts that the router chooses; recorded ones are given only without it.
        hidden = super().forward(*inputs) if self._routing.forces else self._captured(*inputs)
        self.layer_calls += self.olmoe.num_layers
        self.layer_tokens += self.olmoe.num_layers * step.size
        step.finish(self._routing.end(step.size))
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads exactly the physical tensors, each once.

        Raises:
            ValueError: names the missing, unknown and repeated ones; vLLM's own loader skips what it does not know.
        """
        expected, seen = physical_tensors(self.olmoe), []

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                seen.append(name)
                if name in expected:
                    yield name, tensor

        loaded = super().load_weights(checked())
        problems = name_problems(seen, expected)
        if len(set(seen)) != len(seen):
            problems.append(f"repeated: {sorted(n for n in set(seen) if seen.count(n) > 1)[:10]}")
        if problems:
            raise ValueError(f"OLMoE tensors: {'; '.join(problems)}. Expected exactly {len(expected)} tensors")
        return loaded

    def live_tensors(self) -> Iterator[LiveTensor]:
        for name, tensor in physical_tensors(self.olmoe).items():
            if ".mlp.experts." not in name:
                yield self._live(name, tensor.shape, tensor.partition_dim)
            elif name.endswith(".mlp.experts.0.gate_proj.weight"):
                yield from self._live_experts(name.removesuffix("0.gate_proj.weight"))

    def _live(self, name: str, shape: tuple[int, ...], dim: int | None) -> LiveTensor:
        owner, _, leaf = name.rpartition(".")
        stem, _, part = owner.rpartition(".")
        fused = part in QKV
        module = self.get_submodule(f"{stem}.qkv_proj" if fused else owner)
        whole = served_weight(module, leaf)
        tp, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        if part in ("q_norm", "k_norm") or dim is None:  # vLLM norms the gathered projection on every rank
            return LiveTensor(name=name, part=whole, shape=shape)
        if indices := getattr(module, "shard_indices", None):  # vocabulary: padded, so not size / tp
            first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
            return LiveTensor(name=name, part=whole.narrow(0, 0, end - first), shape=shape, dim=0, offset=first)
        length, start = shape[dim] // tp, 0
        if fused:
            attention = self.get_submodule(stem)
            sizes = (attention.q_size, attention.kv_size, attention.kv_size)
            start = sum(sizes[: QKV.index(part)])
        return LiveTensor(name=name, part=whole.narrow(dim, start, length), shape=shape, dim=dim, offset=rank * length)

    def _live_experts(self, prefix: str) -> Iterator[LiveTensor]:
        """All experts of a layer, read back once. Tensor parallelism cuts each expert's width."""
        gate_up, down = served_experts(self.get_submodule(prefix.removesuffix(".")))
        wide, hidden = self.olmoe.intermediate_size, self.olmoe.hidden_size
        own = wide // get_tensor_model_parallel_world_size()
        if gate_up.shape[1] != 2 * own:
            raise RuntimeError(
                f"{prefix}: the kernel pads the experts' width {own} to {gate_up.shape[1] // 2}; choose an "
                "intermediate_size that needs no padding (a multiple of 32 per worker)"
            )
        offset = own * get_tensor_model_parallel_rank()
        for expert in range(self.olmoe.num_experts):
            parts = {"gate_proj": gate_up[expert, :own], "up_proj": gate_up[expert, own:]}
            for leaf, part in parts.items():
                name = f"{prefix}{expert}.{leaf}.weight"
                yield LiveTensor(name=name, part=part, shape=(wide, hidden), dim=0, offset=offset)
            name = f"{prefix}{expert}.down_proj.weight"
            yield LiveTensor(name=name, part=down[expert], shape=(hidden, wide), dim=1, offset=offset)
