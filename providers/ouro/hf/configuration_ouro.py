"""Ouro's config.json for transformers 5, and the words in which it says how deep a token goes.

This file and `modeling_ouro.py` are copied into exported directories, where config.json's `auto_map` names them. They
import nothing but torch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class DepthPolicy:
    """Loops of a token: min(max(d, min_loops) + delay, max_loops), the exit rule having fired at loop d."""

    min_loops: int
    max_loops: int
    threshold: float = 1.0
    delay: int = 0

    @property
    def is_fixed(self) -> bool:
        """True if the gate has no say: every token runs max_loops."""
        return self.min_loops == self.max_loops or self.threshold >= 1


def parse_depth(depth: str | int, num_loops: int) -> DepthPolicy:
    """Reads "full", "fixed:K" (or the integer K), "early:THRESHOLD:MIN:MAX" or "delayed:THRESHOLD:MIN:MAX".

    Raises:
        ValueError: it is none of these, or not 1 <= MIN <= MAX <= num_loops, or THRESHOLD is not > 0.
    """
    kind, *rest = (f"fixed:{depth}" if isinstance(depth, int) else depth).split(":")
    try:
        if kind == "full" and not rest:
            policy = DepthPolicy(num_loops, num_loops)
        elif kind == "fixed":
            (loops,) = map(int, rest)
            policy = DepthPolicy(loops, loops)
        elif kind in ("early", "delayed"):
            threshold, low, high = rest
            policy = DepthPolicy(int(low), int(high), float(threshold), int(kind == "delayed"))
        else:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"depth: got {depth!r}, expected full, fixed:K, early:THRESHOLD:MIN:MAX or delayed:THRESHOLD:MIN:MAX"
        ) from None
    if not 1 <= policy.min_loops <= policy.max_loops <= num_loops or not policy.threshold > 0:
        raise ValueError(f"depth: got {depth!r}, expected 1 <= MIN <= MAX <= {num_loops} loops and a threshold > 0")
    return policy


class OuroConfig(PretrainedConfig):
    """The shape of an Ouro model, and the depth at which it is meant to run."""

    model_type = "ouro"
    keys_to_ignore_at_inference = ["past_key_values", "exit_depths"]
    default_theta = 1e6

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    """Physical layers; each runs up to total_ut_steps times."""
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    total_ut_steps: int = 4
    """Loops of a token that never leaves early."""
    early_exit_threshold: float = 1.0
    """Exit probability mass at which a token leaves when there is no depth_policy; >= 1 never leaves early."""
    depth_policy: str | None = None
    """How deep tokens go (see `parse_depth`), unless a call says otherwise."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        parse_depth(self.default_depth, self.total_ut_steps)

    @property
    def default_depth(self) -> str:
        """The policy of this directory, as text."""
        if self.depth_policy is not None:
            return self.depth_policy
        if self.early_exit_threshold < 1:
            return f"early:{self.early_exit_threshold!r}:1:{self.total_ut_steps}"
        return "full"


__all__ = ["DepthPolicy", "OuroConfig", "parse_depth"]
