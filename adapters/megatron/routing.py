"""What the routers of an update are trained to and report: two losses over the whole update, and how they route.

    load_e  = share of the update's choices that fell on expert e: count_e / (N * K)
    balance = E * sum_e load_e * mean over tokens of p_e        (1 when all experts are used alike)
    z       = mean over tokens of logsumexp(logits) ** 2

of each layer over all N input tokens of the update, averaged over layers, as OLMoE was trained. The load is counted
before the first micro-batch, from the traces or from a pass without gradients; given it, both losses are sums over
tokens, so micro-batches, packing and data-parallel ranks do not change them.

Legend: L layers, E experts, K experts of a token, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from adapters.megatron.moe import Routed
from adapters.megatron.runtime import StepRefused, device, raise_together

if TYPE_CHECKING:
    from adapters.megatron.packing import PackedBatch, TrainSample

Replay = Literal["rollout", "trainer", "none"]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How routers are trained."""

    balance_coefficient: float = 0.01
    """Weight of the load balancing loss."""
    z_coefficient: float = 0.001
    """Weight of the router's z-loss."""
    replay: Replay = "rollout"
    """Experts of a training pass: those that the rollout used, those that the trainer's own weights choose at the start
    of the update, or whatever the pass itself chooses."""
    least_effective_experts: float | None = None
    """An update is refused if the loads of a layer amount to fewer experts than this, exp(entropy of the load); None is
    1.05 * top_k: routers that send every token to the same experts."""

    def __post_init__(self) -> None:
        rules = {
            "balance_coefficient": (self.balance_coefficient >= 0, ">= 0"),
            "z_coefficient": (self.z_coefficient >= 0, ">= 0"),
            "replay": (self.replay in get_args(Replay), f"one of {', '.join(get_args(Replay))}"),
        }
        if bad := [f"{n}: got {getattr(self, n)!r}, expected {want}" for n, (ok, want) in rules.items() if not ok]:
            raise ValueError("RouterSettings " + "; ".join(bad))


class UpdateRouting:
    """The routing of one model's updates, one after another."""

    def __init__(self, settings: RouterSettings, *, num_layers: int, num_experts: int, top_k: int) -> None:
        self.settings, self.top_k = settings, top_k
        self.uniform = torch.full((num_layers, num_experts), 1 / num_experts, device=device())
        self.load = self.uniform
        """[L, E] of the running update; uniform outside of one."""
        self.layers: list[Routed] = []
        """Of the forward pass that ran last."""
        self._training = False

    def begin(
        self,
        samples: Sequence[TrainSample],
        batches: list[PackedBatch],
        run: Callable[[PackedBatch], Any],
        *,
        global_count: int,
    ) -> list[PackedBatch]:
        """Counts the load, and puts the experts to take into the micro-batches. Collective.

        `global_count` is what the summed loss will be divided by.

        Raises:
            ValueError: the rollout's experts are asked for and a sample has none.
            RuntimeError: a layer's router has collapsed.
        """
        self.num_inputs = sum(sample.num_inputs for sample in samples)
        self.global_count = global_count
        self.sums = torch.zeros(5, dtype=torch.float64, device=device())
        if self.settings.replay == "rollout":
            if missing := [i for i, sample in enumerate(samples) if sample.trace is None]:
                raise ValueError(
                    f"sample {missing[0]}: no experts were recorded; replay='rollout' needs them, replay='trainer' and "
                    "replay='none' do not"
                )
            counts = self.count([sample.trace for sample in samples])
        else:
            batches, counts = self._own_choices(batches, run)
        self.load = counts / counts.sum(-1, keepdim=True)
        self._training = True
        self._refuse_collapse()
        return batches

    def count(self, traces: Sequence[Tensor | None]) -> Tensor:
        """[L, E] fp64: how often traces [T, L, K] use each expert."""
        counts = torch.zeros(self.uniform.shape, dtype=torch.float64, device=device())
        for trace in traces:
            if trace is not None:
                by_layer = trace.to(device(), torch.int64).transpose(0, 1).flatten(1)
                counts.scatter_add_(1, by_layer, torch.ones_like(by_layer, dtype=torch.float64))
        return counts

    def side_loss(self) -> Tensor | None:
        """Both losses of the last pass's tokens, scaled to be divided by the global count."""
        if not self._training:
            return None
        settings, num_experts = self.settings, self.uniform.shape[1]
        balance = num_experts * torch.stack([each.balance for each in self.layers]).mean() / self.num_inputs
        z = torch.stack([each.z for each in self.layers]).mean() / self.num_inputs
        with torch.no_grad():
            each = [self.layers[0].balance.new_tensor(len(self.layers[0].chosen))]
            each += [torch.stack([getattr(routed, name) for routed in self.layers]).double().mean() for name in _SUMS]
            self.sums += torch.stack([balance.double(), z.double(), *(value.double() for value in each)])
        return self.global_count * (settings.balance_coefficient * balance + settings.z_coefficient * z)

    def end(self) -> dict[str, float]:
        """Metrics of the update over all ranks. Collective."""
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(self.sums, group=group)
        if self.sums_are_partial:
            dist.all_reduce(self.sums, group=parallel_state.get_tensor_model_parallel_group())
        balance, z, count, agreed, entropy = self.sums.tolist()
        load = self.load * self.top_k
        self.load, self._training, self.layers = self.uniform, False, []
        return {
            "load_balance_loss": balance,
            "router_z_loss": z,
            "routing_agreement": agreed / (count * self.top_k),
            "router_entropy": entropy / count,
            "effective_experts_min": float(effective_experts(load).min()),
            "expert_load_max": float(load.max()),
            "dead_experts": int((load == 0).sum()),
        }

    @property
    def sums_are_partial(self) -> bool:
        """Under sequence parallelism each tensor-parallel rank routes its own slice of the tokens."""
        return parallel_state.get_tensor_model_parallel_world_size() > 1

    def chosen(self) -> Tensor:
        """[T, L, K] experts that the last pass used, of this data-parallel rank's real tokens, whole on every rank."""
        own = torch.stack([each.chosen for each in self.layers], 1)
        if not self.sums_are_partial:
            return own
        group = parallel_state.get_tensor_model_parallel_group()
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, own.cpu(), group=group)
        return torch.cat(parts).to(own.device)

    def _own_choices(
        self, batches: list[PackedBatch], run: Callable[[PackedBatch], Any]
    ) -> tuple[list[PackedBatch], Tensor]:
        """A pass without gradients or replay: the experts that the weights choose now, and how often."""
        chosen = []
        for batch in batches:
            run(replace(batch, trace=None))
            chosen.append(self.chosen().cpu())
        counts = self.count(chosen)
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        keep = self.settings.replay == "trainer"
        traces = [each if keep and len(batch.rows) else None for each, batch in zip(chosen, batches, strict=True)]
        return [replace(batch, trace=trace) for batch, trace in zip(batches, traces, strict=True)], counts

    def _refuse_collapse(self) -> None:
        least = self.settings.least_effective_experts
        least = 1.05 * self.top_k if least is None else least
        effective = effective_experts(self.load)
        layer = int(effective.argmin())
        error = None
        if self.uniform.shape[1] > self.top_k and float(effective[layer]) < least:
            error = StepRefused(
                "router",
                f"the router of layer {layer} has collapsed: its load amounts to {float(effective[layer]):.2f} experts "
                f"of {self.uniform.shape[1]}, expected at least {least:.2f}; nothing was changed. Lower the learning "
                "rate or raise balance_coefficient",
            )
        raise_together(error)


_SUMS = ("agreed", "entropy")


def effective_experts(load: Tensor) -> Tensor:
    """[L] exp(entropy of each layer's load): E when all are used alike, K when every token uses the same K."""
    return torch.special.entr(load / load.sum(-1, keepdim=True)).sum(-1).exp()
