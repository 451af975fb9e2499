"""What an Ouro checkpoint's config.json says, checked field by field. Needs neither torch nor an engine.

Names here are Tether's; the Hugging Face spelling of each is in `from_hf`. A field this module does not read cannot
change the computation; a field that asks for a computation Tether does not do is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters import parallelism
from adapters.hf_convert import fields
from adapters.parallelism import Parallelism
from providers.ouro.policy import DepthPolicy

MODEL_TYPE = "ouro"
REFUSED = {
    "expert": "an Ouro has no experts to divide",
    "expert tensor": "an Ouro has no experts to cut",
    "pipeline": parallelism.PIPELINE,
    "context": parallelism.CONTEXT,
}
"""Kinds of parallelism that training refuses, with the reason."""


@dataclass(frozen=True, kw_only=True)
class OuroConfig:
    """The shape of one Ouro model.

    Raises:
        ValueError: sizes that do not fit each other, all of them in one message.
    """

    vocab_size: int
    """Rows of the embedding and of the (untied) output head."""
    hidden_size: int
    """Width of the hidden states; num_heads * head_dim."""
    intermediate_size: int
    """Width of the gated feed-forward part."""
    num_layers: int
    """Physical layers; each runs num_loops times."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads (grouped-query attention when smaller)."""
    head_dim: int
    """Width of one head; even, because rotary embedding turns halves."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    max_position_embeddings: int
    """Longest sequence, prompt and response together."""
    num_loops: int
    """Loops of a token that never leaves early (Hugging Face: total_ut_steps)."""
    early_exit_threshold: float = 1.0
    """Exit probability mass at which a token leaves when there is no depth_policy; >= 1 never leaves early."""
    depth_policy: str | None = None
    """Loops of generated tokens where a request says nothing (see `policy.DepthPolicy`), as an export recorded it."""
    dtype: str = "float32"
    """The dtype the checkpoint declares."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, as the checkpoint's config names them."""

    @property
    def layer_passes(self) -> int:
        """How often a token runs each layer, at most."""
        return self.num_loops

    @property
    def active_width(self) -> int:
        """Inner width of the feed-forward part that a token runs."""
        return self.intermediate_size

    def kept_bytes(self, element: int, *, fused: bool) -> tuple[int, int]:
        """What one run of one layer keeps of a token for its backward pass: (between projections, inside of them).

        Tensor parallelism divides the second part, sequence parallelism the first. A fused norm keeps its input, one of
        torch's operations the input in fp32 and the output before the weight; before a projection also the output. Then
        queries, keys, values and attention's output, gate and up, their product, and without a fused gate its silu.

        Args:
            element: bytes of an activation.
            fused: norms, rotation and gates are one kernel each, as on CUDA in half precision.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        norms = 6 * element if fused else 2 * (4 + 2 * element) + 2 * (4 + element)
        wide = (3 if fused else 4) * self.intermediate_size
        return norms * self.hidden_size + 4 * 4, element * (attention + wide)

    def backward_bytes(self, *, recompute: bool, fused: bool) -> int:
        """Of a token, what the widest moment of a backward pass in bf16 needs beside what layers keep: gradients of
        activations, counted from its operations. With recompute the moment is inside of a layer."""
        if fused:
            return 6 * (self.hidden_size + self.intermediate_size)
        return (17 if recompute else 20) * self.hidden_size

    def parallel_problems(self, asked: Parallelism) -> list[str]:
        """Why this model cannot be trained so; empty if it can."""
        cut = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
        return parallelism.problems(
            asked,
            refused=REFUSED,
            cut_by_tensor={name: getattr(self, name) for name in cut},
            cut_by_expert={},
            cut_by_expert_tensor={},
        )

    @property
    def default_depth(self) -> str:
        """The policy of a request that names none."""
        if self.depth_policy is not None:
            return self.depth_policy
        if self.early_exit_threshold < 1:
            return f"early:{self.early_exit_threshold!r}:1:{self.num_loops}"
        return "full"

    def __post_init__(self) -> None:
        fields.raise_all(fields.misfits(vars(self)), "OuroConfig", "Ouro")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, where: str = "config.json") -> OuroConfig:
        """The config of a Hugging Face directory.

        Args:
            hf: the parsed config.json.
            where: named in the error, usually the file's path.

        Raises:
            ValueError: every missing, mistyped, unsupported or inconsistent field, in one message.
        """
        problems = _unsupported(hf)
        values = {**fields.integers(hf, _SIZES, problems), **_numbers(hf, problems)}
        values |= fields.heads(hf, values, problems)
        values["dtype"] = fields.dtype(hf, problems)
        values["eos_token_ids"] = fields.eos_token_ids(hf, problems)
        values["depth_policy"] = _depth_policy(hf, values["num_loops"], problems)
        fields.raise_all(problems + fields.misfits(values), where, "Ouro")
        return cls(**values)


Config = OuroConfig
"""The name by which code that knows only the registry finds it."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "num_loops": "total_ut_steps",
}
_ONLY = {
    "model_type": (MODEL_TYPE, "choose the provider of this model type"),
    "hidden_act": ("silu", "the feed-forward part is silu(gate) * up"),
    "tie_word_embeddings": (False, "Ouro's output head is a tensor of its own"),
    "use_sliding_window": (False, "attention is over the whole sequence"),
    "attention_bias": (False, "Ouro's projections have no biases"),
    "mlp_bias": (False, "Ouro's projections have no biases"),
    "attention_dropout": (0, "training runs without dropout, as the rollout did"),
}
_REQUIRED = ("model_type", "hidden_act")


def _unsupported(hf: Mapping[str, Any]) -> list[str]:
    """Fields that ask for another computation than this provider's."""
    problems = fields.only(hf, _ONLY, required=_REQUIRED)
    kinds = hf.get("layer_types")
    if kinds is not None and set(kinds) - {"full_attention"}:
        problems.append(f"layer_types: got {sorted(set(kinds))!r}, expected only 'full_attention'")
    return problems + fields.rope(hf)


def _numbers(hf: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    return {
        "rope_theta": fields.rope_theta(hf, problems),
        "rms_norm_eps": fields.positive(hf, "rms_norm_eps", problems),
        "early_exit_threshold": fields.positive({"early_exit_threshold": 1.0, **hf}, "early_exit_threshold", problems),
    }


def _depth_policy(hf: Mapping[str, Any], num_loops: int | None, problems: list[str]) -> str | None:
    """A policy that fits the model; num_loops is None where the file does not say it."""
    text = hf.get("depth_policy")
    if text is None or num_loops is None:
        return None
    try:
        DepthPolicy.parse(str(text), num_loops)
    except ValueError as error:
        problems.append(f"depth_policy: {error}")
    return str(text)
