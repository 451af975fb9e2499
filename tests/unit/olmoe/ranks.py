"""What the processes of the multi-rank tests of OLMoE's training model run, see `tests.ranks`.

Every layout computes the same: logits of four sequences, one update from the stored weights, a checkpoint after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.unit.megatron_side.samples import tensors_of

launch = partial(ranks.launch, "tests.unit.olmoe.ranks")
LENGTHS = (1, 7, 20, 12)
LEARNING_RATE = 1e-3


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens of four sequences and their boundaries."""
    tokens = torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    return tokens, torch.tensor((0, *LENGTHS)).cumsum(0)


def make_trainer(path: Path, *, load: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A Trainer that clips no gradient; options go to build."""
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer
    from providers.olmoe.config import OlmoeConfig
    from providers.olmoe.model import build

    tokens = options.pop("tokens_per_microbatch", 40)
    directory = HFDirectory(path)
    model = build(OlmoeConfig.from_hf(directory.config), dtype=dtype, **options)
    schedule = OptimizerSettings(learning_rate=LEARNING_RATE, max_grad_norm=0.0)
    trainer = Trainer(model, optimizer=schedule, tokens_per_microbatch=tokens)
    if load:
        trainer.load_hf(directory)
    return trainer


def logits(trainer: Any, trace: torch.Tensor | None = None) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    with torch.no_grad():
        return gather_from_tensor_model_parallel_region(trainer.model(*sequences(), trace))


def measure(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """Logits, scores and one update; the checkpoint after it holds the gradients, as Adam's first moments."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(folder / "model", **options)
    samples = torch.load(folder / "samples.pt", weights_only=False)
    found = {"logits": logits(trainer), "scores": trainer.score(samples), "metrics": trainer.train(samples)}
    checkpoint.save(folder / name, trainer, {"from": name})
    return {**found, "weights": tensors_of(trainer)}


def again(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """What another layout's checkpoint loads as, and the update after it."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(folder / "model", load=False, **options)
    checkpoint.load(folder / name, trainer)
    found = {"loaded": tensors_of(trainer)}
    checkpoint.save(folder / f"{name}_again", trainer, {}, update=1)
    samples = torch.load(folder / "samples.pt", weights_only=False)
    return {**found, "metrics": trainer.train(samples), "weights": tensors_of(trainer)}


STAGES: dict[str, Callable[[Path], Any]] = {
    "alone": lambda folder: measure(folder, "alone"),
    "alone_on": lambda folder: again(folder, "alone"),
    "alone_recompute": lambda folder: measure(folder, "alone_recompute", recompute=True),
    "data": lambda folder: measure(folder, "data"),
    "experts_alltoall": lambda folder: measure(folder, "experts_alltoall", dispatcher="alltoall"),
    "experts_allgather": lambda folder: measure(folder, "experts_allgather", dispatcher="allgather", recompute=True),
    "tensor": lambda folder: measure(folder, "tensor"),
    "tensor_experts": lambda folder: measure(folder, "tensor_experts"),
    "cut_experts": lambda folder: measure(folder, "cut_experts"),
    "experts_data": lambda folder: measure(folder, "experts_data"),
    "tensor_experts_data": lambda folder: measure(folder, "tensor_experts_data", dispatcher="allgather"),
    "cut_divided_experts": lambda folder: measure(folder, "cut_divided_experts", dispatcher="allgather"),
    "experts_from_alone": lambda folder: again(folder, "alone"),
    "alone_from_experts": lambda folder: again(folder, "experts_alltoall"),
    "alone_from_tensor_experts": lambda folder: again(folder, "tensor_experts"),
    "alone_from_cut_experts": lambda folder: again(folder, "cut_experts"),
}
LAYOUTS = {
    "experts_alltoall": {"expert_parallel": 2},
    "experts_allgather": {"expert_parallel": 2},
    "tensor": {"tensor_parallel": 2},
    "tensor_experts": {"tensor_parallel": 2, "expert_parallel": 2},
    "cut_experts": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "experts_data": {"expert_parallel": 2},
    "tensor_experts_data": {"tensor_parallel": 2, "expert_parallel": 2},
    "cut_divided_experts": {"expert_parallel": 2, "expert_tensor_parallel": 2},
    "experts_from_alone": {"expert_parallel": 2},
}

if __name__ == "__main__":
    ranks.run(STAGES, LAYOUTS)
