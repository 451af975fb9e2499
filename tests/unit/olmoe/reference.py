"""transformers' OlmoeForCausalLM as an oracle: logits, routing, and the gradients of a whole update's loss.

The three parts of the loss are written out here once more, from their definitions and not from the project's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import OlmoeForCausalLM

    return OlmoeForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def run(model: Any, tokens: Sequence[int], experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-> logits [T, V] and router logits [T, L, E] of one sequence; with experts [T, L, K] it takes those."""
    routers = [layer.mlp.gate for layer in model.model.layers]
    if experts is not None:
        for index, router in enumerate(routers):
            router.forward = _forced(router, experts[:, index])
    try:
        out = model(torch.tensor([list(tokens)]), output_router_logits=True)
    finally:
        for router in routers:
            router.__dict__.pop("forward", None)
    return out.logits[0], torch.stack(out.router_logits, 1)


def _forced(router: Any, experts: Tensor) -> Any:
    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        return logits, logits.softmax(-1).gather(1, experts), experts

    return forward


def routing(model: Any, tokens: Sequence[int]) -> Tensor:
    """[T, L, K] the experts that the model itself chooses."""
    with torch.no_grad():
        return run(model, tokens)[1].topk(model.config.num_experts_per_tok, -1).indices


def logprobs(logits: Tensor, sample: Any) -> Tensor:
    """Log-probs of the sample's response, at its temperature."""
    scores = (logits / sample.temperature).log_softmax(-1)
    first = len(sample.prompt_token_ids) - 1
    return scores[first:].gather(1, torch.tensor(sample.response_token_ids)[:, None])[:, 0]


def losses(model: Any, samples: Sequence[Any]) -> dict[str, Tensor]:
    """The update's policy loss at ratio 1, load balancing loss and z-loss.

    balance: of each layer E * sum over experts of (share of choices) * (mean probability), averaged over layers.
    z: mean over tokens of logsumexp(router logits) ** 2, averaged over layers.
    """
    policy, all_logits, all_experts = 0.0, [], []
    for sample in samples:
        tokens = [*sample.prompt_token_ids, *sample.response_token_ids][:-1]
        logits, router_logits = run(model, tokens, sample.trace)
        policy = policy - sample.advantage * logprobs(logits, sample).sum()
        all_logits.append(router_logits)
        all_experts.append(sample.trace)
    router, experts = torch.cat(all_logits), torch.cat(all_experts)
    num_experts = router.shape[-1]
    share = F.one_hot(experts, num_experts).sum(2).double().mean(0) / experts.shape[-1]
    balance = num_experts * (share * router.softmax(-1).mean(0)).sum(-1).mean()
    z = router.logsumexp(-1).square().mean()
    return {"policy": policy / sum(s.num_scored for s in samples), "balance": balance, "z": z}


def gradients(model: Any, samples: Sequence[Any], *, balance: float = 0.01, z: float = 0.001) -> dict[str, Tensor]:
    """Gradient of the whole loss by checkpoint name."""
    model.zero_grad()
    parts = losses(model, samples)
    (parts["policy"] + balance * parts["balance"] + z * parts["z"]).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                for leaf, grad in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[f"{name.removesuffix('gate_up_proj')}{expert}.{leaf}.weight"] = grad
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = grad
        else:
            found[name] = parameter.grad
    return {name: grad.clone() for name, grad in found.items()}
