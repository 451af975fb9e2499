"""The functions that the flags of VIME and slime name. The only room that knows a framework's `args`.

    --custom-model-provider-path                    tether.vime.model_provider
    --custom-megatron-init-path                     tether.vime.init
    --custom-megatron-before-log-prob-hook-path     tether.vime.before_log_prob
    --custom-megatron-before-train-step-hook-path   tether.vime.before_train_step
    --rollout-data-postprocess-path                 tether.vime.check_scores
    --custom-generate-function-path                 tether.vime.generate
    --custom-convert-samples-to-train-data-path     tether.vime.convert_samples
    --custom-update-weight-post-write-path          tether.vime.after_publication

Each is imported when it is asked for: a rollout process never loads Megatron, a training process never an engine.
docs/vime.md says how they are used and what of it was run.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "model_provider": "model",
    "init": "install",
    "before_log_prob": "hooks",
    "before_train_step": "hooks",
    "check_scores": "hooks",
    "generate": "rollout",
    "convert_samples": "samples",
    "after_publication": "publication",
}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; expected one of {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
