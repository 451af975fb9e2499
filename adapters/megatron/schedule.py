"""The learning rate over updates, and parameters that have their own rate, their own decay, or none at all.

The shapes are Megatron-Core's. A parameter is found by its name with `*` and `?`; the experts of a layer are one
stacked parameter and go by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import nn

from adapters.megatron.parameter_groups import ParameterGroup


class Schedule(OptimizerParamScheduler):
    """Megatron's, with each group's factor on all of the curve: on the warm-up's start and on the floor too."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        return super().get_lr({}) * param_group.get("lr_mult", 1.0)


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Takes parameters out of training, before an optimizer sees them.

    Raises:
        ValueError: a pattern that no parameter's name matches, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    require_matches(named, patterns, what="freeze")
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"freeze: {', '.join(patterns)} leave no parameter to train")


def require_matches(names: Iterable[str], patterns: Iterable[str], *, what: str) -> None:
    """Raises ValueError for patterns that match none of the names: a misspelt one would do nothing, silently."""
    names = list(names)
    if lost := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]:
        raise ValueError(f"{what}: no parameter is called {', '.join(lost)}; names are like {', '.join(names[:3])}")


def group_overrides(config: OptimizerConfig, groups: Sequence[ParameterGroup]) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's own groups (vectors without decay) and these. A parameter goes by the first group that matches."""
    overrides = dict(get_standard_config_overrides(config))
    for index, group in enumerate(groups):
        earlier = [each.pattern for each in groups[:index]]

        def matches(param: Any, name: str, group: ParameterGroup = group, earlier: list[str] = earlier) -> bool:
            name = own_name(name)
            return fnmatchcase(name, group.pattern) and not any(fnmatchcase(name, other) for other in earlier)

        def decays(param: Any, name: str, matches: Any = matches) -> bool:
            return param.dim() > 1 and not name.endswith(".bias") and matches(param, name)

        for key, value, predicate in (("lr_mult", group.lr, matches), ("wd_mult", group.weight_decay, decays)):
            if value != 1.0:
                found = ParamWithNamePredicate(name=f"{key} {group.pattern}", fn=predicate)
                overrides[ParamKey(with_name_predicate=found)] = {key: value}
    return overrides


def own_name(name: str) -> str:
    """A parameter's name without what wrappers put in front of it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
