"""Compares what config.json makes the model compute with what it should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from adapters.hf_convert.directory import CONFIG
from providers.registry import provider
from tether.checks import Check, check
from tether.stored import Weights

CHOSEN = frozenset({"dtype", "eos_token_ids", "depth_policy", "early_exit_threshold"})
"""What an export may change of its source's config: not what the layers compute."""
_ABSENT = object()


def config_differences(
    weights: Weights, wanted: Mapping[str, Any], whose: str, *, ours: frozenset = frozenset()
) -> list[str]:
    """Entries of config.json that make it another model, in the file's own words; nothing if only spellings differ.

    Args:
        wanted: the config.json that should be there, parsed.
        whose: what it is, for the message.
        ours: fields of the provider's config that may differ.
    """
    config_class = provider(weights.model_type, "config").Config
    try:
        right = dataclasses.asdict(config_class.from_hf(wanted))
    except ValueError as error:
        return [f"the {whose} config cannot be read: {error}"]
    now = dataclasses.asdict(weights.config())
    fields = sorted(name for name in now if name not in ours and now[name] != right[name])
    if not fields:
        return []
    file = weights.source.config
    keys = sorted(key for key in {*file, *wanted} if file.get(key, _ABSENT) != wanted.get(key, _ABSENT))
    said = [f"{key}: got {_shown(file, key)}, {whose} {_shown(wanted, key)}" for key in keys]
    return [f"{CONFIG} is of another model ({', '.join(fields)}): " + ", ".join(said)]


def against_source(weights: Weights, against: Weights) -> Check:
    """config.json against the one that belongs to other weights."""
    if against.source.path == weights.path:
        return Check(name="model", passed=None, detail=f"{against.path} does not say which model it is of")
    if against.model_type != weights.model_type:
        return check("model", [f"got {weights.model_type!r}, {against.path} is {against.model_type!r}"], "")
    differences = config_differences(weights, against.source.config, "there", ours=CHOSEN)
    return check("model", differences, f"the config of {against.source.path}")


def _shown(config: Mapping[str, Any], key: str) -> str:
    return repr(config[key]) if key in config else "nothing"
