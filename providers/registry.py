"""Finds a provider by the exact Hugging Face `model_type`, and registers all of them with vLLM.

Providers are imported lazily and part by part: a trainer never loads an engine's code, an engine never a trainer's.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Literal

PROVIDERS = {"ouro": "providers.ouro", "olmoe": "providers.olmoe"}

Part = Literal["config", "physical", "trace", "model", "engine"]


def provider(model_type: str, part: Part) -> ModuleType:
    """The module `providers.<name>.<part>` for a model type.

    Raises:
        ValueError: no provider has this model type.
    """
    if model_type not in PROVIDERS:
        raise ValueError(
            f"config.json: got model_type {model_type!r}, expected one of {sorted(PROVIDERS)}. "
            "docs/adding-a-model.md says how to add one"
        )
    return importlib.import_module(f"{PROVIDERS[model_type]}.{part}")


def remote_code(model_type: str) -> ModuleType | None:
    """Our code for transformers (FOLDER, FILES, AUTO_MAP, register); None for a model that transformers has itself."""
    name = f"{provider(model_type, 'config').__name__.rpartition('.')[0]}.remote_code"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def register_configs() -> None:
    """Makes transformers read the config.json of every provider's model, by our code where it has none. Idempotent."""
    for model_type in PROVIDERS:
        if (ours := remote_code(model_type)) is not None:
            ours.register(config_only=True)


def register_vllm() -> None:
    """Entry point `vllm.general_plugins`: runs in every vLLM process, before any model is built. Idempotent.

    vLLM only logs a plugin that raises; the engine process checks `patches.applied()` and refuses to start without us.
    """
    from adapters.vllm_engine.worker import patches, plain

    for model_type in PROVIDERS:
        provider(model_type, "engine").register()
    plain.follow_recorded_policy()
    patches.apply()
