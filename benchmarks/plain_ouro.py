"""Ouro's body in plain PyTorch, whole sequences of one length: the peer of our replay. Shares no code with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


class PlainOuro(nn.Module):
    """Embedding, then every layer `total_ut_steps` times at full depth."""

    def __init__(self, hf: dict[str, Any], *, recompute: bool) -> None:
        super().__init__()
        self.hf, self.recompute = hf, recompute
        hidden, wide, heads = hf["hidden_size"], hf["intermediate_size"], hf["num_attention_heads"] * hf["head_dim"]
        shapes = {"q": (heads, hidden), "k": (heads, hidden), "v": (heads, hidden), "o": (hidden, heads)}
        shapes |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        shapes |= {name: (hidden,) for name in NORMS}
        self.embedding = nn.Parameter(torch.empty(hf["vocab_size"], hidden))
        self.norm = nn.Parameter(torch.empty(hidden))
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})
            for _ in range(hf["num_hidden_layers"])
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, tokens] ids -> [sequences, tokens, hidden]."""
        x = F.embedding(tokens, self.embedding)
        rotary = self.rotary(tokens.shape[1], tokens.device)
        for _ in range(self.hf["total_ut_steps"]):
            for layer in self.layers:
                if self.recompute:
                    x = checkpoint(self.layer, x, layer, rotary, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = self.layer(x, layer, rotary)
            x = self.rms(x, self.norm)
        return x

    def layer(self, x: Tensor, w: nn.ParameterDict, rotary: tuple[Tensor, Tensor]) -> Tensor:
        y = self.rms(x, w["input_layernorm"])
        q, k, v = (F.linear(y, w[n]).unflatten(-1, (-1, self.hf["head_dim"])).transpose(1, 2) for n in "qkv")
        q, k = (self.rotate(each, *rotary) for each in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.rms(F.linear(out, w["o"]), w["input_layernorm_2"])
        y = self.rms(x, w["post_attention_layernorm"])
        out = F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])
        return x + self.rms(out, w["post_attention_layernorm_2"])

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.hf["rms_norm_eps"])

    def rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        width = self.hf["head_dim"]
        frequencies = self.hf["rope_theta"] ** (-torch.arange(0, width, 2, device=device) / width)
        angles = torch.arange(length, device=device)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        dtype = self.norm.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
