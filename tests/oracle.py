"""Ouro in plain fp64 PyTorch, one sequence at a time, all positions of a loop at once. Shares no code with the project.

Answers for a given trace: the log-probs of given tokens, and the exit chance after each loop that a token ran. The
per-token reference in `tests/unit/ouro/reference.py` is written the other way round and must agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Oracle:
    """A checkpoint, ready to answer in `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float64) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.weights = {name: w.to(dtype) for name, w in load_file(path / "model.safetensors").items()}
        self.dtype = dtype

    @torch.no_grad()
    def run(self, tokens: list[int], loops: list[int]) -> tuple[Tensor, Tensor]:
        """-> logits [n, V] after each position's last loop, and exit chances [n, T] (NaN where a loop did not run)."""
        c, w = self.config, self.weights
        n, total, layers = len(tokens), c["total_ut_steps"], c["num_hidden_layers"]
        depth, position = torch.tensor(loops), torch.arange(n)
        h = w["model.embed_tokens.weight"][torch.tensor(tokens)]
        chances = torch.full((n, total), float("nan"), dtype=self.dtype)
        cache: list[tuple[Tensor, Tensor] | None] = [None] * layers
        for loop in range(1, total + 1):
            active = torch.nonzero(depth >= loop)[:, 0]
            if not len(active):
                break
            x = h[active]
            for i in range(layers):
                x, cache[i] = self._layer(i, x, active, position, cache[i])
            h = h.index_copy(0, active, self._norm(x, "model.norm"))
            gate = F.linear(h[active], w["model.early_exit_gate.weight"], w["model.early_exit_gate.bias"])
            chances[active, loop - 1] = torch.sigmoid(gate[:, 0])
        return h @ w["lm_head.weight"].T, chances

    def logprobs(self, tokens: list[int], loops: list[int], num_prompt: int, temperature: float) -> list[float]:
        """Log-probs of tokens[num_prompt:] at a temperature; `loops` has a value per input, len(tokens) - 1."""
        logits, _ = self.run(tokens[:-1], loops)
        scores = (logits / temperature).log_softmax(-1)
        return scores[torch.arange(len(loops)), torch.tensor(tokens[1:])][num_prompt - 1 :].tolist()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            self.weights[f"{name}.weight"] * x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        )

    def _layer(
        self, i: int, x: Tensor, active: Tensor, position: Tensor, cache: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        def part(name: str) -> Tensor:
            return self.weights[f"model.layers.{i}.{name}.weight"]

        prefix, dim = f"model.layers.{i}", self.config["head_dim"]
        y = self._norm(x, f"{prefix}.input_layernorm")
        q, k, v = ((y @ part(f"self_attn.{name}_proj").T).unflatten(-1, (-1, dim)) for name in "qkv")
        q, k = self._rotate(q, active), self._rotate(k, active)
        blank = x.new_zeros(len(position), *k.shape[1:])
        keys, values = (
            old.index_copy(0, active, new) for old, new in zip(cache or (blank, blank), (k, v), strict=True)
        )
        repeat = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeat, 1)) / dim**0.5
        scores = scores.masked_fill(position[None] > active[:, None], float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(repeat, 1)).flatten(1)
        x = x + self._norm(mixed @ part("self_attn.o_proj").T, f"{prefix}.input_layernorm_2")
        y = self._norm(x, f"{prefix}.post_attention_layernorm")
        y = (F.silu(y @ part("mlp.gate_proj").T) * (y @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
        return x + self._norm(y, f"{prefix}.post_attention_layernorm_2"), (keys, values)

    def _rotate(self, heads: Tensor, position: Tensor) -> Tensor:
        dim = heads.shape[-1]
        frequency = self.config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = (position.double()[:, None] * frequency).to(self.dtype)[:, None]
        a, b = heads.split(dim // 2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def rule_violation(
    chances: list[float], depth: int, *, threshold: float, low: int, high: int, delay: int, margin: float = 1e-5
) -> str | None:
    """None if `depth` is what the exit rule says for these chances, computed anew; a tie within `margin` allows both.

    The rule fires at the first loop d whose cumulated exit probability reaches the threshold (never if that is >= 1);
    depth = min(max(d, low) + delay, high).
    """
    allowed, survival, mass = set(), 1.0, 0.0
    for loop, chance in enumerate(chances[:depth], start=1):
        mass, survival = mass + survival * chance, survival * (1 - chance)
        if threshold < 1 and mass >= threshold - margin:
            allowed.add(min(max(loop, low) + delay, high))
            if mass >= threshold + margin:
                break
    else:
        allowed.add(high)
    return None if depth in allowed else f"ran {depth} loops, the rule allows {sorted(allowed)}"
