"""Ouro in plain PyTorch, one token at a time as a decoder would, sharing no code with the project. Differentiable.

Token t of a sequence runs depth[t] loops. In loop d it reads plane d of the cache, where each earlier token j left the
keys and values of its loop min(d, depth[j]). Works in the dtype of the weights it is given (fp64 is the oracle).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt((x * x).mean() + eps)


def _turn(heads: Tensor, position: int, theta: float) -> Tensor:
    half = heads.shape[-1] // 2
    frequency = torch.tensor([theta ** (-2.0 * i / heads.shape[-1]) for i in range(half)], dtype=torch.float64)
    cos, sin = ((position * frequency).cos().to(heads.dtype), (position * frequency).sin().to(heads.dtype))
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logits(weights: dict[str, Tensor], config: dict[str, Any], tokens: list[int], depth: list[int]) -> Tensor:
    """[len(tokens), vocabulary] of one sequence."""
    loops, layers = config["total_ut_steps"], config["num_hidden_layers"]
    keys = [[[] for _ in range(layers)] for _ in range(loops)]  # [plane][layer] -> list over positions
    values = [[[] for _ in range(layers)] for _ in range(loops)]
    rows = []
    for position, token in enumerate(tokens):
        h = weights["model.embed_tokens.weight"][token]
        for d in range(depth[position]):
            planes = range(d, loops) if d + 1 == depth[position] else [d]
            for i in range(layers):
                h = _layer(weights, config, i, h, position, [(keys[p][i], values[p][i]) for p in planes])
            h = _norm(h, weights["model.norm.weight"], config["rms_norm_eps"])
        rows.append(weights["lm_head.weight"] @ h)
    return torch.stack(rows)


def _layer(
    weights: dict[str, Tensor], config: dict[str, Any], i: int, h: Tensor, position: int, planes: list
) -> Tensor:
    """One layer for one token; its keys and values go to all `planes`, it reads the first."""
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    w = {n.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): t for n, t in weights.items() if f"s.{i}." in n}
    x = _norm(h, w["input_layernorm"], eps)
    q = _turn((w["self_attn.q_proj"] @ x).view(-1, dim), position, config["rope_theta"])
    k = _turn((w["self_attn.k_proj"] @ x).view(-1, dim), position, config["rope_theta"])
    v = (w["self_attn.v_proj"] @ x).view(-1, dim)
    for plane_keys, plane_values in planes:
        plane_keys.append(k)
        plane_values.append(v)
    seen_keys, seen_values = torch.stack(planes[0][0]), torch.stack(planes[0][1])
    per_key = q.shape[0] // k.shape[0]
    heads = []
    for head in range(q.shape[0]):
        scores = (seen_keys[:, head // per_key] @ q[head]) / dim**0.5
        heads.append(scores.softmax(-1) @ seen_values[:, head // per_key])
    h = h + _norm(w["self_attn.o_proj"] @ torch.cat(heads), w["input_layernorm_2"], eps)
    x = _norm(h, w["post_attention_layernorm"], eps)
    gate = w["mlp.gate_proj"] @ x
    x = w["mlp.down_proj"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj"] @ x))
    return h + _norm(x, w["post_attention_layernorm_2"], eps)
