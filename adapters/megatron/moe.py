"""Experts on Megatron-Core's router and token dispatchers: dropless, replayed from a trace, stacked for one product.

The router decides in fp32, softmax before top-k, and gives the chosen experts the probabilities as they are. With a
trace the experts are those of the trace, and their probabilities come from the live scores, so that the router's
gradient flows; activation recomputation is given the same trace again and so takes the same experts.

Legend: T tokens on this rank, E experts of a layer, K experts of a token, N rows in expert order, H hidden width,
I this rank's width of one expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from adapters.megatron import determinism
from adapters.megatron.elementwise import gated_halves, is_fused, scaled_rows
from adapters.megatron.gather import Gather
from adapters.megatron.stacked import Stack

DISPATCHERS = {"alltoall": MoEAlltoAllTokenDispatcher, "allgather": MoEAllGatherTokenDispatcher}


class Routed(NamedTuple):
    """What one layer's router did with the tokens of this rank. The first two carry gradients."""

    balance: Tensor
    """[] sum over tokens and experts of probability * load; see `routing.UpdateRouting`."""
    z: Tensor
    """[] sum over tokens of logsumexp(logits) ** 2."""
    chosen: Tensor
    """[T, K] int64 experts, ascending."""
    agreed: Tensor
    """[] how many of them the live scores would have chosen."""
    entropy: Tensor
    """[] sum over tokens of the entropy of the live probabilities, in nats."""


def moe_config(*, num_experts: int, top_k: int, width: int, dispatcher: str, dtype: torch.dtype) -> dict[str, object]:
    """The entries of a TransformerConfig for dropless softmax routing without renormalisation."""
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"dispatcher: got {dispatcher!r}, expected one of {sorted(DISPATCHERS)}")
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": width,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        # Their scale would depend on the micro-batch; `routing` computes both losses over the whole update.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": dispatcher,
        "moe_enable_routing_replay": True,
    }


class Router(TopKRouter):
    """Megatron's router. Given experts, it takes those."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, get_default_pg_collection())

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] and the experts [T, K] to take, or None -> probabilities, choice (bool) and logits, each [T, E]."""
        logits = self.gating(x)
        replay = self.router_replay
        assert replay is not None
        if experts is None:
            replay.clear_router_replay_action()
        else:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            replay.set_target_indices(experts)
        with determinism.not_needed():  # each probability has a place of its own
            probabilities, choice = self.routing(logits)
        replay.clear_indices()
        return probabilities, choice, logits


class Experts(MegatronModule):
    """This rank's experts: down(silu(gate(x)) * up(x)), each over the rows that chose it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        count = config.num_moe_experts // config.expert_model_parallel_size
        first = count * parallel_state.get_expert_model_parallel_rank()
        wide = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        hidden, dtype = config.hidden_size, config.params_dtype
        gate_up = Stack(parts=("gate_proj", "up_proj"), first=first, count=count, dim=0)
        down = Stack(parts=("down_proj",), first=first, count=count, dim=1)
        self.stacks = {each.leaf: each for each in (gate_up, down)}
        self.first, self.count, self._gate_up, self._down = first, count, gate_up.leaf, down.leaf
        self.register_parameter(gate_up.leaf, nn.Parameter(torch.empty(count, 2 * wide, hidden, dtype=dtype)))
        self.register_parameter(down.leaf, nn.Parameter(torch.empty(count, hidden, wide, dtype=dtype)))
        for weight in self.parameters():
            # At every expert-parallel size, also 1: the optimizer then always has the same parts, and loads anywhere.
            weight.allreduce = False
            # Each rank of a tensor-parallel group keeps its own slice of the optimizer's state: count it in the norm.
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1

    def forward(self, x: Tensor, rows_per_expert: Tensor, probabilities: Tensor) -> Tensor:
        """[N, H] rows in expert order, [experts] their counts, [N] weights -> [N, H], this rank's summand of it.

        Expert tensor parallelism leaves the sum over its ranks to the dispatcher.
        """
        wide = gated_halves(grouped_linear(x, getattr(self, self._gate_up), rows_per_expert))
        return scaled_rows(grouped_linear(wide, getattr(self, self._down), rows_per_expert), probabilities)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: object = (), metadata: object = None
    ) -> dict[str, object]:
        """Every expert's tensors under their own names."""
        return {f"{prefix}{leaf}": each.sharded(prefix, getattr(self, leaf)) for leaf, each in self.stacks.items()}


def grouped_linear(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    """x @ weight[e].T for each expert's rows: [N, in] in expert order, [experts, out, in] -> [N, out].

    One grouped product in bf16 on CUDA, elsewhere one product an expert. An expert without rows gets a zero gradient.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        ends = rows_per_expert.to(x.device, torch.int32).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    parts = x.split(rows_per_expert.tolist())
    return torch.cat([F.linear(rows, each) for rows, each in zip(parts, weight.unbind(0), strict=True)])


def chosen_experts(choice: Tensor, top_k: int) -> Tensor:
    """[T, E] bool, `top_k` True in every row -> [T, K] int64 ascending, without waiting for the device."""
    number = choice.shape[1]
    names = torch.arange(number, device=choice.device, dtype=torch.int16)
    return torch.where(choice, names, number).sort(-1).values[:, :top_k].long()


class MoE(MegatronModule):
    """Router, dispatcher and experts of one layer. The names of its parts are those of the checkpoint."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.gate, self.experts = Router(config), Experts(config)
        count, first = self.experts.count, self.experts.first
        own = list(range(first, first + count))
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]
        self.dispatcher = dispatcher(count, own, config=config, pg_collection=get_default_pg_collection())
        self.has_all_experts = count == config.num_moe_experts and not (
            config.tensor_model_parallel_size > 1 or config.expert_tensor_parallel_size > 1
        )

    def forward(self, x: Tensor, experts: Tensor | None, load: Tensor, num_real: int) -> tuple[Tensor, Routed]:
        """
        Args:
            x: [T, H]; with the allgather dispatcher every rank of the expert group has as many rows.
            experts: [T, K] int64 experts to take, None lets the router choose.
            load: [E] share of the update's choices that fell on each expert.
            num_real: rows before the padding.

        Returns:
            [T, H] and what the router did with the real rows.
        """
        probabilities, choice, logits = self.gate(x, experts)
        chosen = chosen_experts(choice, self.config.moe_router_topk)
        if self.has_all_experts and is_fused(x):
            out = self._run_here(x, choice, probabilities, chosen)
        else:
            out = self._run_dispatched(x, choice, probabilities)
        return out, self._routed(logits[:num_real], chosen[:num_real], load)

    def _run_dispatched(self, x: Tensor, choice: Tensor, probabilities: Tensor) -> Tensor:
        dispatcher = self.dispatcher
        rows, weights = dispatcher.dispatch_preprocess(x, choice, probabilities)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        out = dispatcher.combine_preprocess(self.experts(rows, counts, weights))
        return dispatcher.combine_postprocess(dispatcher.token_combine(out))

    def _run_here(self, x: Tensor, choice: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """The same where this rank has all of every expert: no atomic sums, and nothing waits for the device."""
        from adapters.megatron.kernels import experts as kernels

        to = kernels.places(chosen)
        by_row = Gather(rows=to.choices, inverse=to.rows.flatten())
        weights = by_row(probabilities.gather(1, chosen).flatten())
        return kernels.collect(self.experts(kernels.spread(x, to), choice.sum(0), weights), to)

    def _routed(self, logits: Tensor, chosen: Tensor, load: Tensor) -> Routed:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1)
        top_k = self.config.moe_router_topk
        with torch.no_grad():
            live = scores.topk(top_k, -1).indices
            entropy = torch.special.entr(scores).sum()
        return Routed(
            balance=(scores @ load.to(scores)).sum(),
            z=logits.logsumexp(-1).square().sum(),
            chosen=chosen,
            agreed=(live[:, :, None] == chosen[:, None]).sum(),
            entropy=entropy,
        )
