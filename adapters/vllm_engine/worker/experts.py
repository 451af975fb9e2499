"""vLLM's fused experts: which ones each token used, replay of recorded ones, and their weights as they are served.

Works on any model with `RoutedExperts` and routers of vLLM's base class; names no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from adapters.vllm_engine.worker import patches
from adapters.vllm_engine.worker.step import Step


class ExpertRouting:
    """The experts of a step's tokens: captured by vLLM's own capturer, and forced where a token has run before.

    A recorded token takes its recorded experts, with the probabilities that the live scores give them, just as a
    trainer replays them. So a token recomputed after preemption, and a sequence scored by its trace, run as recorded.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(most_tokens, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self._forced: tuple[torch.Tensor, torch.Tensor] | None = None
        for module in model.modules():
            if isinstance(module, MoERunner):
                if module._quant_method.is_monolithic:
                    raise RuntimeError(
                        f"{module.layer_name}: its kernel routes inside, where recorded experts cannot be replayed; "
                        "choose another MoE backend of vLLM"
                    )
                self._force(module.router, module.layer_id)

    @property
    def forces(self) -> bool:
        """Whether a token of this step takes recorded experts."""
        return self._forced is not None

    def begin(self, step: Step, unknown: int) -> None:
        """Reads from the step which tokens have run before: their rows [n, layers, top_k] hold no `unknown`."""
        seen = (step.recorded != unknown).all((1, 2))
        self._forced = None
        if seen.any():
            rows = np.flatnonzero(seen)
            self._forced = step.index(rows), step.index(step.recorded[rows])

    def end(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, layers, top_k] experts that the step's tokens used: a copy, on the model's device."""
        self._forced = None
        return self._capturer.snapshot_routing_data(num_tokens)

    def _force(self, router: Any, layer: int) -> None:
        """Wraps the choice of one layer's router; the capturer sees what comes out."""
        choose = router._compute_routing
        patches.expect_parameters(choose, ["hidden_states", "router_logits", "indices_type"])

        def compute_routing(
            hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: Any, **options: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights, experts = choose(hidden_states, router_logits, indices_type, **options)
            if self._forced is None:
                return weights, experts
            rows, recorded = self._forced
            wanted = recorded[:, layer]
            scores = router_logits[rows].softmax(-1, dtype=torch.float32).gather(1, wanted)
            # A token that would choose the same experts keeps the kernel's own weights, bit for bit.
            differs = (wanted != experts[rows]).any(1)
            weights, experts = weights.clone(), experts.clone()
            weights[rows[differs]] = scores[differs].to(weights.dtype)
            experts[rows[differs]] = wanted[differs].to(experts.dtype)
            return weights, experts

        router._compute_routing = compute_routing


def prepack(model: nn.Module) -> None:
    """Packs reloaded expert weights for the CPU kernel, which vLLM's reload forgets: it would serve wrong products."""
    for _, module, kernel in _cpu_experts(model):
        kernel.process_weights_after_loading(module)


def served_experts(runner: MoERunner) -> tuple[torch.Tensor, torch.Tensor]:
    """gate-and-up [experts, 2 I, H] and down [experts, H, I] of one layer as they are served, bitwise.

    The CPU kernel reads a packed layout; packing only moves elements, so where each one went is found by packing their
    numbers.
    """
    module = runner.routed_experts
    weights = module.w13_weight.detach(), module.w2_weight.detach()
    for _, packed, kernel in _cpu_experts(runner):
        if packed is module:
            return _unpack(weights[0], kernel.isa), _unpack(weights[1], kernel.isa)
    return weights


def _cpu_experts(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, kernel) of the experts whose weights a CPU kernel packs."""
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight") and module.w13_weight.device.type == "cpu":
            kernel = module.quant_method.moe_kernel.fused_experts
            if not kernel._use_zentorch:
                yield name, module, kernel


def _unpack(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Takes back `cpu_prepack_moe_weight` on [experts, rows, columns]."""
    shape = packed.shape[1:]
    numbers = torch.arange(shape.numel(), dtype=torch.int32)
    if packed.element_size() == 4:
        place = _packed_bits(numbers.view(shape), packed.dtype, isa)
    else:
        low, high = (numbers & 0xFFFF).to(torch.int16), (numbers >> 16).to(torch.int16)
        low, high = (_packed_bits(half.view(shape), packed.dtype, isa) for half in (low, high))
        place = (low.to(torch.int64) & 0xFFFF) + (high.to(torch.int64) << 16)
    place = place.to(torch.int64).flatten()
    if not torch.equal(place.sort().values, torch.arange(len(place))):
        raise RuntimeError(f"cpu_prepack_moe_weight with isa {isa!r} does more than move elements: vLLM changed")
    plain = torch.empty_like(packed).flatten(1)
    plain[:, place] = packed.flatten(1)
    return plain.view(packed.shape)


def _packed_bits(bits: torch.Tensor, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Packs integers of the dtype's width as if they were its bit patterns."""
    return cpu_prepack_moe_weight(bits.view(dtype)[None], isa).view(bits.dtype)
