"""Ouro for vLLM: what vLLM's loader and runner call, and what Tether's worker calls.

The layers are in `engine_layers`; here are registration, policies, and the way between physical tensors and vLLM's
fused and packed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix

from adapters.hf_convert.blocks import Blocks
from adapters.vllm_engine.worker.model_interface import LiveTensor, Policy, TraceLayout
from adapters.vllm_engine.worker.readback import served_weight
from adapters.vllm_engine.worker.step import Step
from providers.ouro.config import MODEL_TYPE, OuroConfig
from providers.ouro.engine_layers import OuroModel
from providers.ouro.hf.configuration_ouro import OuroConfig as HFConfig
from providers.ouro.physical import physical_tensors
from providers.ouro.policy import DepthPolicy
from providers.ouro.trace import KIND

logger = init_logger(f"vllm.{__name__}")  # vLLM sets up the log of its own names only
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def register() -> None:
    """Makes vLLM and transformers know Ouro in this process. Idempotent."""
    AutoConfig.register(MODEL_TYPE, HFConfig, exist_ok=True)
    ModelRegistry.register_model("OuroForCausalLM", OuroForCausalLM)


class OuroForCausalLM(nn.Module):
    """What vLLM's loader and runner call, and what Tether's worker calls (`TracedModel`)."""

    policy_width = 4

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = OuroConfig.from_hf(vllm_config.model_config.hf_config.to_dict())
        tp = get_tensor_model_parallel_world_size()
        if config.num_kv_heads % tp:
            raise ValueError(
                f"tensor_parallel: got {tp}, expected a divisor of the {config.num_kv_heads} key and value heads"
            )
        loops = config.num_loops
        self.trace_layout = TraceLayout(kind=KIND, least=1, most=loops, prompt_value=loops)
        self.model = OuroModel(config=config, vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        logger.info("Ouro: depth %s of %d loops by default (config.json)", config.default_depth, loops)

    @property
    def step(self) -> Step | None:
        return self.model.step

    @step.setter
    def step(self, step: Step | None) -> None:
        self.model.step = step

    @property
    def layer_calls(self) -> int:
        return self.model.layer_calls

    @property
    def layer_tokens(self) -> int:
        return self.model.layer_tokens

    def parse_policy(self, text: str | None) -> Policy:
        policy = DepthPolicy.parse(text or self.config.default_depth, self.config.num_loops)
        return Policy(vector=policy.vector, reach=policy.max_loops)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads exactly the physical tensors, each once.

        Raises:
            ValueError: names the missing, unknown and repeated ones.
        """
        expected, seen, repeated = physical_tensors(self.config), set(), set()
        parameters, loaded, unknown = dict(self.named_parameters()), set(), set()
        for name, tensor in weights:
            if name in seen or name not in expected:
                (repeated if name in seen else unknown).add(name)
                continue
            seen.add(name)
            target, shard = _fused(name)
            load = getattr(parameters[target], "weight_loader", default_weight_loader)
            load(parameters[target], tensor, *shard)
            loaded.add(target)
        problems = {"missing": expected.keys() - seen, "unknown": unknown, "repeated": repeated}
        if named := [f"{kind} {sorted(names)[:10]}" for kind, names in problems.items() if names]:
            raise ValueError(f"Ouro tensors: {', '.join(named)}; expected exactly {len(expected)} tensors")
        return loaded

    def live_tensors(self) -> Iterator[LiveTensor]:
        served: tuple[str, torch.Tensor | Blocks | None] = ("", None)
        for name, tensor in physical_tensors(self.config).items():
            target, shard = _fused(name)
            owner, _, leaf = target.rpartition(".")
            module = self.get_submodule(owner)
            if served[0] != target:  # the parts of a fused weight follow each other: read it back once
                served = target, served_weight(module, leaf)
            whole, dim = served[1], tensor.partition_dim
            assert whole is not None
            if dim is None:
                yield LiveTensor(name=name, part=whole, shape=tensor.shape)
                continue
            start, length, offset = self._place(module, shard, tensor.shape[dim])
            yield LiveTensor(
                name=name, part=whole.narrow(dim, start, length), shape=tensor.shape, dim=dim, offset=offset
            )

    def _place(self, module: nn.Module, shard: tuple[Any, ...], size: int) -> tuple[int, int, int]:
        """Where this worker's part is: its start in the (fused) weight, its length, and its offset in the whole."""
        tp, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        if indices := getattr(module, "shard_indices", None):  # vocabulary: padded, so not size / tp
            first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
            return 0, end - first, first
        length, start = size // tp, 0
        if shard and shard[0] in ("q", "k", "v"):
            start = sum(self.model.layers[0].self_attn.sizes[: "qkv".index(shard[0])])
        elif shard:
            start = shard[0] * length
        return start, length, rank * length


def _fused(name: str) -> tuple[str, tuple[Any, ...]]:
    """The parameter that holds a physical tensor, and its shard within: () when the tensor stands alone."""
    stem, _, leaf = name.rpartition(".")
    stem, _, module = stem.rpartition(".")
    if module in QKV:
        return f"{stem}.qkv_proj.{leaf}", (module[0],)
    if module in GATE_UP:
        return f"{stem}.gate_up_proj.{leaf}", (GATE_UP.index(module),)
    return name, ()
