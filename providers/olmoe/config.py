"""What an OLMoE checkpoint's config.json says, checked field by field. Needs neither torch nor an engine.

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

MODEL_TYPE = "olmoe"
REFUSED = {"pipeline": parallelism.PIPELINE, "context": parallelism.CONTEXT}
"""Kinds of parallelism that training refuses, with the reason."""
MOST_EXPERTS = 255
"""An expert's number is a byte of the trace, and its value 255 means that no expert was recorded."""


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig:
    """The shape of one OLMoE model.

    Raises:
        ValueError: sizes that do not fit each other, all of them in one message.
    """

    vocab_size: int
    """Rows of the embedding and of the (untied) output head."""
    hidden_size: int
    """Width of the hidden states; num_heads * head_dim."""
    intermediate_size: int
    """Width of one expert's gated feed-forward part."""
    num_layers: int
    """Layers, each with attention and experts."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads (grouped-query attention when smaller)."""
    head_dim: int
    """Width of one head; even, because rotary embedding turns halves."""
    num_experts: int
    """Experts of a layer."""
    top_k: int
    """Experts that a token uses (Hugging Face: num_experts_per_tok)."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    max_position_embeddings: int
    """Longest sequence, prompt and response together."""
    clip_qkv: float | None = None
    """If set, queries, keys and values are clamped to [-clip_qkv, clip_qkv] before the rotary embedding."""
    dtype: str = "float32"
    """The dtype the checkpoint declares."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, as the checkpoint's config names them."""

    layer_passes = 1
    """How often a token runs each layer, at most."""

    @property
    def active_width(self) -> int:
        """Inner width of the feed-forward parts that a token runs."""
        return self.top_k * self.intermediate_size

    def kept_bytes(self, element: int, *, fused: bool) -> tuple[int, int]:
        """What one layer keeps of a token for its backward pass: (between projections and in experts, in attention).

        Tensor parallelism divides the second part, sequence parallelism the first. A fused norm keeps its input, one of
        torch's operations the input in fp32 and the output before the weight; before a projection also the output.
        Attention keeps queries, keys, values, its output and a copy of it; the router 22 bytes for each expert; the
        experts, for each that the token uses, its input, gate and up, their product, without a fused gate its silu, the
        output before the probability, and where it goes.

        Args:
            element: bytes of an activation.
            fused: norms, rotation and gates are one kernel each, as on CUDA in half precision.
        """
        norm = element if fused else 4 + element
        wide = (3 if fused else 4) * self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        experts = self.top_k * (element * (2 * self.hidden_size + wide) + 36)
        attention = norm * (queries + keys) + element * (3 * queries + 2 * keys)
        return 2 * (norm + element) * self.hidden_size + 4 * 4 + 22 * self.num_experts + experts, attention

    def backward_bytes(self, *, recompute: bool, fused: bool) -> int:
        """Of a token, what the widest moment of a backward pass in bf16 needs beside what layers keep: gradients of
        activations, counted from its operations. With recompute the moment is inside of a layer."""
        if fused:
            return 6 * self.hidden_size + self.top_k * (4 * self.hidden_size + 6 * self.intermediate_size)
        rows = 12 * self.top_k + 34 if recompute else 14 * self.top_k - 4
        return max(20, rows) * self.hidden_size

    def parallel_problems(self, asked: Parallelism) -> list[str]:
        """Why this model cannot be trained so; empty if it can."""
        cut = ("num_heads", "num_kv_heads", "vocab_size")
        return parallelism.problems(
            asked,
            refused=REFUSED,
            cut_by_tensor={name: getattr(self, name) for name in cut},
            cut_by_expert={"num_experts": self.num_experts},
            cut_by_expert_tensor={"intermediate_size": self.intermediate_size},
        )

    def __post_init__(self) -> None:
        fields.raise_all(_misfits(vars(self)), "OlmoeConfig", "OLMoE")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, where: str = "config.json") -> OlmoeConfig:
        """The config of a Hugging Face directory.

        Args:
            hf: the parsed config.json.
            where: named in the error, usually the file's path.

        Raises:
            ValueError: every missing, mistyped, unsupported or inconsistent field, in one message.
        """
        problems = fields.only(hf, _ONLY, required=_REQUIRED) + fields.rope(hf)
        values = fields.integers(hf, _SIZES, problems)
        values |= fields.heads(hf, values, problems)
        values["rope_theta"] = fields.rope_theta({"rope_theta": 10000.0, **_present(hf)}, problems)
        values["rms_norm_eps"] = fields.positive({"rms_norm_eps": 1e-5, **hf}, "rms_norm_eps", problems)
        clip = hf.get("clip_qkv")
        values["clip_qkv"] = None if clip is None else fields.positive(hf, "clip_qkv", problems)
        values["dtype"] = fields.dtype(hf, problems)
        values["eos_token_ids"] = fields.eos_token_ids(hf, problems)
        fields.raise_all(problems + _misfits(values), where, "OLMoE")
        return cls(**values)


Config = OlmoeConfig
"""The name by which code that knows only the registry finds it."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "max_position_embeddings": "max_position_embeddings",
}
_ONLY = {
    "model_type": (MODEL_TYPE, "choose the provider of this model type"),
    "hidden_act": ("silu", "an expert is down(silu(gate) * up)"),
    "norm_topk_prob": (False, "the chosen experts' probabilities are used as the softmax gives them"),
    "tie_word_embeddings": (False, "OLMoE's output head is a tensor of its own"),
    "attention_bias": (False, "OLMoE's projections have no biases"),
    "attention_dropout": (0, "training runs without dropout, as the rollout did"),
}
_REQUIRED = ("model_type", "hidden_act")


def _present(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary base wherever the file has it; transformers writes null for the default."""
    nested = hf.get("rope_parameters")
    named = hf.get("rope_theta") or (nested.get("rope_theta") if isinstance(nested, Mapping) else None)
    return {} if named is None else {"rope_theta": named}


def _misfits(values: Mapping[str, Any]) -> list[str]:
    problems = fields.misfits(values)
    experts, top_k = values["num_experts"], values["top_k"]
    if experts is not None and experts > MOST_EXPERTS:
        problems.append(f"num_experts: got {experts}, expected at most {MOST_EXPERTS} (a trace has a byte for each)")
    if None not in (experts, top_k) and top_k > experts:
        problems.append(f"num_experts_per_tok: got {top_k}, expected at most num_experts = {experts}")
    return problems
