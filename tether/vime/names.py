"""Tensors between Hugging Face directories and the framework's walks over parameters.

The framework loads and sends parameter by parameter, by a name that begins with wrappers ("module.module.") and goes on
with the physical name, or with the name of a stack of experts (`adapters.megatron.stacked`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.hf_convert.names import listing
from adapters.megatron.stacked import parse_stack
from tether.vime.arguments import ModelFacts, facts_of, read_facts

WRAPPER = "module."
VALUE_HEAD = "output_layer."
"""What the framework puts on a critic instead of the output head."""


def physical_name(name: str) -> str:
    """A parameter's name without the wrappers' prefixes."""
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    return name


def hf_tensor(name: str, reader: Any, config: Any) -> Tensor:
    """HF -> Megatron: the whole tensor of a parameter, before tensor parallelism cuts it.

    Args:
        name: the framework's name of the parameter.
        reader: its reader of a Hugging Face directory: `path`, `get_tensor(name)`.
        config: transformers' config of that directory; the directory's own config.json is read instead.

    Raises:
        ValueError: no such tensor in the model, another shape in the directory, or a value that is not finite.
    """
    facts, name = read_facts(Path(reader.path)), physical_name(name)
    if name.startswith(VALUE_HEAD):
        # Not in a checkpoint of a policy: the framework leaves its own start values when this has another height.
        return reader.get_tensor("lm_head.weight") if name.endswith("weight") else torch.zeros(1)
    if (stacked := parse_stack(name)) is None:
        return _read(name, reader, facts)
    prefix, stack = stacked
    parts = [_read(each, reader, facts) for each in stack.names(prefix, stack.first, stack.count)]
    each = len(stack.parts)
    return torch.stack([torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)])


def to_hf(args: Any, name: str, param: Tensor) -> list[tuple[str, Tensor]]:
    """Megatron -> HF: (name, whole tensor) of everything in a parameter that was gathered over tensor parallelism.

    Raises:
        ValueError: a tensor that the checkpoint does not have, or one of another shape.
    """
    facts, name = facts_of(args), physical_name(name)
    stacked = parse_stack(name)
    found = {name: param} if stacked is None else stacked[1].views(stacked[0], param)
    for each, tensor in found.items():
        _check(each, tuple(tensor.shape), facts, where="the parameters")
    return list(found.items())


def _read(name: str, reader: Any, facts: ModelFacts) -> Tensor:
    tensor = reader.get_tensor(name) if name in facts.table else torch.empty(0)
    _check(name, tuple(tensor.shape), facts, where=str(facts.path))
    if not (tensor.is_meta or torch.isfinite(tensor).all()):
        raise ValueError(f"{facts.path}: {name} holds values that are not finite")
    return tensor


def _check(name: str, shape: tuple[int, ...], facts: ModelFacts, *, where: str) -> None:
    if name not in facts.table:
        near = [each for each in facts.table if each.rpartition(".")[0].endswith(name.rpartition(".")[0][-12:])]
        raise ValueError(
            f"{where}: {name!r} is no tensor of a {facts.model_type} of {facts.path}; near it: {listing(near[:10])}"
        )
    if shape != facts.table[name].shape:
        raise ValueError(f"{where}: {name} has shape {shape}, expected {facts.table[name].shape}")
