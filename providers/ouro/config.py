"""What an Ouro checkpoint's config.json says, checked field by field. Needs neither torch nor an engine.

Names here are Tether's; the Hugging Face spelling of each is in `from_hf`. A field this module does not read cannot
change the computation; a field that asks for a computation Tether does not do is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_TYPE = "ouro"
DTYPES = ("float32", "bfloat16", "float16")


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
    """Exit probability mass at which a token leaves; >= 1 never leaves early."""
    dtype: str = "float32"
    """The dtype the checkpoint declares."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, as the checkpoint's config names them."""

    def __post_init__(self) -> None:
        _raise_all(_misfits(vars(self)), "OuroConfig")

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
        values = {**_sizes(hf, problems), **_numbers(hf, problems)}
        values["dtype"] = _dtype(hf, problems)
        values["eos_token_ids"] = _eos_token_ids(hf, problems)
        _raise_all(problems + _misfits(values), where)
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
    problems = []
    for name, (want, why) in _ONLY.items():
        if name in hf or name in _REQUIRED:
            got = hf.get(name)
            if got != want and not (got is None and name not in _REQUIRED):
                problems.append(f"{name}: got {got!r}, expected {want!r} ({why})")
    kinds = hf.get("layer_types")
    if kinds is not None and set(kinds) - {"full_attention"}:
        problems.append(f"layer_types: got {sorted(set(kinds))!r}, expected only 'full_attention'")
    for name in ("rope_scaling", "rope_parameters"):
        problems += _rope_problems(name, hf.get(name))
    return problems


def _rope_problems(name: str, rope: Any) -> list[str]:
    if rope is None:
        return []
    if not isinstance(rope, Mapping):
        return [f"{name}: got {rope!r}, expected null or an object"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    extra = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
    if kind == "default" and not extra:
        return []
    return [f"{name}: got type {kind!r} with {extra!r}, expected the default rotary embedding without scaling"]


def _sizes(hf: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    values = {ours: _integer(hf, theirs, problems) for ours, theirs in _SIZES.items()}
    heads = values["num_heads"]
    values["num_kv_heads"] = _integer(hf, "num_key_value_heads", problems) if "num_key_value_heads" in hf else heads
    if hf.get("head_dim") is not None:
        values["head_dim"] = _integer(hf, "head_dim", problems)
    else:
        values["head_dim"] = values["hidden_size"] // heads if heads and values["hidden_size"] else None
    return values


def _numbers(hf: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    rope = hf.get("rope_parameters")
    nested = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    return {
        "rope_theta": _positive({"rope_theta": hf.get("rope_theta", nested)}, "rope_theta", problems),
        "rms_norm_eps": _positive(hf, "rms_norm_eps", problems),
        "early_exit_threshold": _positive({"early_exit_threshold": 1.0, **hf}, "early_exit_threshold", problems),
    }


def _integer(hf: Mapping[str, Any], name: str, problems: list[str]) -> int | None:
    got = hf.get(name)
    if isinstance(got, int) and not isinstance(got, bool) and got >= 1:
        return got
    problems.append(f"{name}: {'missing' if name not in hf else f'got {got!r}'}, expected an integer >= 1")
    return None


def _positive(hf: Mapping[str, Any], name: str, problems: list[str]) -> float | None:
    got = hf.get(name)
    if isinstance(got, int | float) and not isinstance(got, bool) and math.isfinite(got) and got > 0:
        return float(got)
    problems.append(f"{name}: {'missing' if got is None else f'got {got!r}'}, expected a finite number > 0")
    return None


def _dtype(hf: Mapping[str, Any], problems: list[str]) -> str:
    got = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if got not in DTYPES:
        problems.append(f"torch_dtype: got {got!r}, expected one of {DTYPES!r}")
    return got


def _eos_token_ids(hf: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    got = hf.get("eos_token_id")
    ids = () if got is None else tuple(got) if isinstance(got, list | tuple) else (got,)
    if bad := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]:
        problems.append(f"eos_token_id: got {bad!r}, expected token ids >= 0")
        return ()
    return ids


def _misfits(values: Mapping[str, Any]) -> list[str]:
    """Sizes that are fine alone and wrong together. A size that is missing (None) is not judged again."""
    hidden, heads, kv, dim = (values[n] for n in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"))
    problems = []
    if None not in (hidden, heads, dim) and heads * dim != hidden:
        problems.append(
            f"num_attention_heads * head_dim: got {heads} * {dim} = {heads * dim}, expected hidden_size = {hidden}"
        )
    if None not in (heads, kv) and heads % kv:
        problems.append(f"num_key_value_heads: got {kv}, expected a divisor of num_attention_heads = {heads}")
    if dim is not None and dim % 2:
        problems.append(f"head_dim: got {dim}, expected an even number (rotary embedding turns two halves)")
    vocab = values["vocab_size"]
    if vocab is not None and (outside := [i for i in values["eos_token_ids"] if i >= vocab]):
        problems.append(f"eos_token_id: got {outside!r}, expected ids below vocab_size = {vocab}")
    return problems


def _raise_all(problems: list[str], where: str) -> None:
    if problems:
        raise ValueError(f"{where}: {len(problems)} problem(s) with this Ouro config:\n  " + "\n  ".join(problems))
