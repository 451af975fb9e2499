"""What a real trainer holds at several layouts: the stages of `test_memory.py`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from providers.registry import provider
from tests import ranks
from tests.tiny import OLMOE_CONFIG, OURO_CONFIG

CONFIGS = {"ouro": OURO_CONFIG, "olmoe": OLMOE_CONFIG}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ouro_dp2": ("ouro", {"dtype": "bfloat16"}),
    "ouro_dp2_replicated": ("ouro", {"dtype": "bfloat16", "distributed_optimizer": False}),
    "ouro_tp2": ("ouro", {"dtype": "float32", "tensor_parallel": 2}),
    "olmoe_ep2": ("olmoe", {"dtype": "bfloat16", "expert_parallel": 2}),
    "olmoe_etp2": ("olmoe", {"dtype": "float32", "expert_tensor_parallel": 2}),
}
"""Model and settings of a run, by stage."""


def count(name: str, folder: Path) -> dict[str, int]:
    from adapters.megatron.optimizer import DataParallelSettings, OptimizerSettings
    from adapters.megatron.trainer import Trainer
    from benchmarks.memory import counted

    model_type, settings = LAYOUTS[name]
    config = provider(model_type, "config").Config.from_hf(CONFIGS[model_type])
    trainer = Trainer(
        provider(model_type, "model").build(config, dtype=getattr(torch, settings["dtype"])),
        optimizer=OptimizerSettings(learning_rate=1e-6),
        tokens_per_microbatch=64,
        parallel=DataParallelSettings(distributed_optimizer=settings.get("distributed_optimizer", True)),
    )
    return counted(trainer)


if __name__ == "__main__":
    stages = {name: partial(count, name) for name in LAYOUTS}
    parallel = {
        name: {key: size for key, size in settings.items() if key.endswith("_parallel")}
        for name, (_, settings) in LAYOUTS.items()
    }
    ranks.run(stages, parallel)
