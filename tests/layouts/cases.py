"""Models, layouts, samples and trainers of the matrices in this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.tiny import write_olmoe, write_ouro
from tests.unit.megatron_side.samples import make_samples

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer

WRITE = {"ouro": write_ouro, "olmoe": write_olmoe}
BETA1 = 0.9
OLMOE_LAYERS, OLMOE_EXPERTS, OLMOE_TOP_K = 2, 8, 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes, and how they divide the work."""

    world: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool | None = None
    """Sequence parallelism; None leaves it to the model."""
    overlap: bool = False
    """Gradient reductions and parameter gathers overlap, in buckets of a few thousand values."""

    @property
    def runtime(self) -> dict[str, int]:
        return {
            "tensor_parallel": self.tensor,
            "expert_parallel": self.expert,
            "expert_tensor_parallel": self.expert_tensor,
        }


LAYOUTS: dict[str, dict[str, Layout]] = {
    "ouro": {
        "one": Layout(),
        "dp2": Layout(world=2),
        "dp2_overlap": Layout(world=2, overlap=True),
        "tp2": Layout(world=2, tensor=2),
        "tp2_sp": Layout(world=2, tensor=2, sequence=True),
        "dp2_tp2": Layout(world=4, tensor=2),
        "dp2_tp2_sp_overlap": Layout(world=4, tensor=2, sequence=True, overlap=True),
    },
    "olmoe": {
        "one": Layout(),
        "dp2": Layout(world=2),
        "tp2": Layout(world=2, tensor=2),
        "ep2": Layout(world=2, expert=2),
        "ep2_overlap": Layout(world=2, expert=2, overlap=True),
        "ep2_tp2": Layout(world=2, tensor=2, expert=2),
        "etp2": Layout(world=2, expert_tensor=2),
        "tp2_etp2": Layout(world=2, tensor=2, expert_tensor=2),
        "dp2_tp2": Layout(world=4, tensor=2),
        "dp2_ep2": Layout(world=4, expert=2),
        "dp2_ep2_tp2": Layout(world=4, tensor=2, expert=2),
        "ep2_etp2_overlap": Layout(world=4, expert=2, expert_tensor=2, overlap=True),
        "tp2_ep2_etp2": Layout(world=4, tensor=2, expert=2, expert_tensor=2),
        "dp2_ep2_tp2_overlap": Layout(world=4, tensor=2, expert=2, overlap=True),
    },
}
"""Sequence parallelism is part of every OLMoE layout with tensor parallelism: experts need it."""

CROSSING = {
    "ouro": ("one", "dp2", "tp2", "dp2_tp2"),
    "olmoe": ("one", "dp2", "tp2", "dp2_tp2", "ep2", "ep2_tp2", "dp2_ep2_tp2", "tp2_etp2", "tp2_ep2_etp2"),
}
"""Layouts whose checkpoints are loaded at each other: those that divide the stored tensors differently."""


def samples_of(model: str, count: int, *, seed: int) -> list[TrainSample]:
    """Samples of odd sizes with random traces: loops of each token, or its experts in each layer."""
    samples = make_samples(count, seed=seed)
    if model == "ouro":
        return samples
    generator = torch.Generator().manual_seed(seed)

    def experts(rows: int) -> torch.Tensor:
        order = torch.rand(rows, OLMOE_LAYERS, OLMOE_EXPERTS, generator=generator).argsort(-1)
        return order[..., :OLMOE_TOP_K].contiguous()

    return [replace(sample, trace=experts(sample.num_inputs)) for sample in samples]


def make_trainer(
    model: str, path: Path, *, dtype: torch.dtype = torch.float32, load: bool = True, layout: Layout | None = None,
    distributed_optimizer: bool = True, max_grad_norm: float = 0.0, **build: Any,
) -> Trainer:  # fmt: skip
    """A Trainer of the checkpoint in `path`. Micro-batches are small, so that every rank has several."""
    import importlib

    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.grpo import GrpoSettings
    from adapters.megatron.mismatch import MismatchSettings
    from adapters.megatron.optimizer import DataParallelSettings, OptimizerSettings
    from adapters.megatron.trainer import Trainer

    config = importlib.import_module(f"providers.{model}.config").Config
    builder = importlib.import_module(f"providers.{model}.model").build
    directory, layout = HFDirectory(path), layout or Layout()
    if layout.sequence is not None:
        build["sequence_parallel"] = layout.sequence
    overlap = layout.overlap and distributed_optimizer
    trainer = Trainer(
        builder(config.from_hf(directory.config), dtype=dtype, **build),
        optimizer=OptimizerSettings(
            learning_rate=1e-3, lr_warmup_updates=2, lr_decay_updates=9, max_grad_norm=max_grad_norm, beta1=BETA1
        ),
        grpo=GrpoSettings(old_policy="rollout", mismatch=MismatchSettings(correction="none")),
        tokens_per_microbatch=40,
        parallel=DataParallelSettings(
            distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=overlap,
            bucket_elements=20_000 if layout.overlap else None,
        ),
    )
    if load:
        trainer.load_hf(directory)
    return trainer


def stored(path: Path, kind: str | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint: all, or those of a kind of optimizer state ("exp_avg") by parameter name."""
    from adapters.megatron.checkpoint_reader import CheckpointReader

    reader, prefix = CheckpointReader(path), f"optimizer.state.{kind}."
    names = [name for name in reader.shapes if kind is None or name.startswith(prefix)]
    return {name.removeprefix(prefix): tensor for name, tensor in reader.read(sorted(names))}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
