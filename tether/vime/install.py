"""The start-up hook: tells the framework how our models' weights are read and written, and where versions go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from adapters.megatron.optimizer import use_adam_with_megatron_layout
from providers.registry import PROVIDERS, register_configs
from tether.vime import framework
from tether.vime.names import hf_tensor, to_hf
from tether.vime.versions import set_start_version

READERS = "backends.megatron_utils.hf_to_megatron"
WRITERS = "backends.megatron_utils.megatron_to_hf"
OURS = "_tether_conversion"


def init(args: Any) -> None:
    """For --custom-megatron-init-path. Runs in every training process, before the model is built. Idempotent.

    Raises:
        ImportError, RuntimeError: the framework has moved; says what was expected.
    """
    register_configs()
    use_adam_with_megatron_layout()
    install_readers(framework.part(READERS))
    install_writer(framework.part(WRITERS))
    set_start_version(args)


def install_readers(module: ModuleType) -> None:
    """HF -> Megatron: one entry of the framework's table for each of our model types."""
    loaders = getattr(module, "_LOADERS", None)
    framework.require(isinstance(loaders, dict), f"{module.__name__}._LOADERS: got {loaders!r}, expected a dict")
    framework.require_parameters(
        module.load_hf_weights, ("args", "model", "path"), f"{module.__name__}.load_hf_weights"
    )
    assert isinstance(loaders, dict)
    for model_type in PROVIDERS:
        other = loaders.get(model_type, hf_tensor)
        framework.require(other is hf_tensor, f"{module.__name__}._LOADERS has {model_type!r} already: {other!r}")
        loaders[model_type] = hf_tensor


def install_writer(module: ModuleType) -> None:
    """Megatron -> HF: ours for our models in front of the framework's closed chain, which it looks up at every call."""
    core = getattr(module, "_convert_to_hf_core", None)
    framework.require(callable(core), f"{module.__name__}._convert_to_hf_core: got {core!r}, expected a function")
    assert core is not None
    if getattr(core, OURS, False):
        return
    framework.require_parameters(
        core, ("args", "model_name", "name", "param"), f"{module.__name__}._convert_to_hf_core"
    )
    calls = module.convert_to_hf.__code__.co_names
    framework.require(
        "_convert_to_hf_core" in calls, f"{module.__name__}.convert_to_hf does not call _convert_to_hf_core"
    )
    module._convert_to_hf_core = _in_front_of(core)  # type: ignore[attr-defined]


def is_ours(model_name: str) -> bool:
    """Whether a name that the framework gives to a model (its --model-name, or "ouroconfig") is one of our models'."""
    return model_name.lower().replace("_", "").replace("-", "").removesuffix("config") in PROVIDERS


def _in_front_of(core: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(core)
    def convert(args: Any, model_name: str, name: str, param: Tensor) -> list[tuple[str, Tensor]]:
        if is_ours(model_name):
            return to_hf(args, name, param)
        return core(args, model_name, name, param)

    setattr(convert, OURS, True)
    return convert
