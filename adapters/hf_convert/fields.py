"""Reads fields of a config.json one by one, collecting what is wrong with them. Needs no torch.

Each reader takes the parsed file and a list of problems, appends a line to it when a field is missing or wrong, and
then returns None (or a default), so that a provider reports everything in one message.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def only(hf: Mapping[str, Any], wanted: Mapping[str, tuple[Any, str]], *, required: Collection[str]) -> list[str]:
    """Problems with fields that ask for another computation.

    Args:
        hf: the parsed file.
        wanted: the one value that each field may have, and why.
        required: fields that must be there; another one may be missing or null.
    """
    problems = []
    for name, (want, why) in wanted.items():
        got = hf.get(name)
        if got != want and (name in required or got is not None):
            problems.append(f"{name}: got {got!r}, expected {want!r} ({why})")
    return problems


def rope(hf: Mapping[str, Any]) -> list[str]:
    """Problems with rope_scaling and rope_parameters: only the default rotary embedding is computed."""
    problems = []
    for name in ("rope_scaling", "rope_parameters"):
        value = hf.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            problems.append(f"{name}: got {value!r}, expected null or an object")
            continue
        kind = value.get("rope_type", value.get("type", "default"))
        extra = sorted(set(value) - {"rope_type", "type", "rope_theta"})
        if kind != "default" or extra:
            problems.append(
                f"{name}: got type {kind!r} with {extra!r}, expected the default rotary embedding without scaling"
            )
    return problems


def rope_theta(hf: Mapping[str, Any], problems: list[str]) -> float | None:
    """The base of the rotary frequencies, at the top or (transformers 5) inside rope_parameters."""
    inner = hf.get("rope_parameters")
    nested = inner.get("rope_theta") if isinstance(inner, Mapping) else None
    if nested is not None and hf.get("rope_theta", nested) != nested:
        problems.append(f"rope_theta: got {hf['rope_theta']!r}, and {nested!r} in rope_parameters, expected one value")
    return positive({"rope_theta": hf.get("rope_theta", nested)}, "rope_theta", problems)


def integer(hf: Mapping[str, Any], name: str, problems: list[str]) -> int | None:
    """An integer >= 1."""
    got = hf.get(name)
    if isinstance(got, int) and not isinstance(got, bool) and got >= 1:
        return got
    problems.append(f"{name}: {'missing' if name not in hf else f'got {got!r}'}, expected an integer >= 1")
    return None


def integers(hf: Mapping[str, Any], names: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """Integers >= 1 by our names; `names` has the file's spelling of each."""
    return {ours: integer(hf, theirs, problems) for ours, theirs in names.items()}


def heads(hf: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """num_kv_heads and head_dim, which follow from num_heads and hidden_size where the file leaves them out."""
    count, hidden = values["num_heads"], values["hidden_size"]
    given_kv, given_dim = (hf.get(name) is not None for name in ("num_key_value_heads", "head_dim"))
    return {
        "num_kv_heads": integer(hf, "num_key_value_heads", problems) if given_kv else count,
        "head_dim": integer(hf, "head_dim", problems) if given_dim else hidden // count if count and hidden else None,
    }


def positive(hf: Mapping[str, Any], name: str, problems: list[str]) -> float | None:
    """A finite number > 0."""
    got = hf.get(name)
    if isinstance(got, int | float) and not isinstance(got, bool) and math.isfinite(got) and got > 0:
        return float(got)
    problems.append(f"{name}: {'missing' if got is None else f'got {got!r}'}, expected a finite number > 0")
    return None


def dtype(hf: Mapping[str, Any], problems: list[str]) -> str:
    """The dtype that the file declares; float32 where it declares none."""
    got = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if got not in DTYPES:
        problems.append(f"torch_dtype: got {got!r}, expected one of {DTYPES!r}")
    return got


def eos_token_ids(hf: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    """The end tokens: none, one, or a list."""
    got = hf.get("eos_token_id")
    ids = () if got is None else tuple(got) if isinstance(got, list | tuple) else (got,)
    if bad := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]:
        problems.append(f"eos_token_id: got {bad!r}, expected token ids >= 0")
        return ()
    return ids


def misfits(values: Mapping[str, Any]) -> list[str]:
    """Sizes that are fine alone and wrong together. A size that is missing (None) is not judged again."""
    hidden, count, kv, dim = (values[n] for n in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"))
    problems = []
    if None not in (hidden, count, dim) and count * dim != hidden:
        problems.append(
            f"num_attention_heads * head_dim: got {count} * {dim} = {count * dim}, expected hidden_size = {hidden}"
        )
    if None not in (count, kv) and count % kv:
        problems.append(f"num_key_value_heads: got {kv}, expected a divisor of num_attention_heads = {count}")
    if dim is not None and dim % 2:
        problems.append(f"head_dim: got {dim}, expected an even number (rotary embedding turns two halves)")
    vocab = values["vocab_size"]
    if vocab is not None and (outside := [i for i in values["eos_token_ids"] if i >= vocab]):
        problems.append(f"eos_token_id: got {outside!r}, expected ids below vocab_size = {vocab}")
    return problems


def raise_all(problems: list[str], where: str, what: str) -> None:
    """Raises ValueError with all problems, if there are any; `what` names the kind of config."""
    if problems:
        raise ValueError(f"{where}: {len(problems)} problem(s) with this {what} config:\n  " + "\n  ".join(problems))
