"""Random samples to train on, and a tiny trainer over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer

LOOPS = 4


def make_samples(count: int, *, seed: int = 0, traced: bool = True, longest: int = 12) -> list[TrainSample]:
    """Samples of odd sizes, some of one prompt or one response token, with rollout log-probs near a uniform policy."""
    from adapters.megatron.packing import TrainSample

    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    samples = []
    for index in range(count):
        prompt, response = integers(1, longest // 2, 1)[0], 1 if index == 1 else integers(1, longest, 1)[0]
        trace = torch.full((prompt + response - 1,), LOOPS)
        trace[prompt:] = torch.tensor(integers(1, LOOPS + 1, response - 1), dtype=torch.int64)
        samples.append(
            TrainSample(
                prompt_token_ids=integers(0, 256, prompt),
                response_token_ids=integers(0, 256, response),
                rollout_logprobs=(-5.5 + 0.2 * torch.randn(response, generator=generator)).tolist(),
                advantage=float(torch.randn(1, generator=generator)),
                trace=trace if traced else None,
                temperature=0.8 if index % 2 else 1.0,
            )
        )
    return samples


def make_trainer(path: Path, *, dtype: torch.dtype = torch.float32, load: bool = True, **options: Any) -> Trainer:
    """A Trainer of the checkpoint in `path`; options go to build, OptimizerSettings or Trainer.

    The ratio is taken against the samples' rollout log-probs unless `grpo` says otherwise: they are random.
    """
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.grpo import GrpoSettings
    from adapters.megatron.mismatch import MismatchSettings
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer
    from providers.ouro.config import OuroConfig
    from providers.ouro.model import build

    directory = HFDirectory(path)
    build_names = ("recompute", "sequence_parallel", "logprob_chunk_rows")
    model = build(
        OuroConfig.from_hf(directory.config),
        dtype=dtype,
        **{name: options.pop(name) for name in build_names if name in options},
    )
    tokens_per_microbatch, parallel = options.pop("tokens_per_microbatch", 40), options.pop("parallel", None)
    against_rollout = GrpoSettings(old_policy="rollout", mismatch=MismatchSettings(correction="none"))
    grpo = options.pop("grpo", against_rollout)
    settings = OptimizerSettings(**{"learning_rate": 1e-3, "max_grad_norm": 1.0, **options})
    trainer = Trainer(
        model, optimizer=settings, grpo=grpo, tokens_per_microbatch=tokens_per_microbatch, parallel=parallel
    )
    if load:
        trainer.load_hf(directory)
    return trainer


def with_reference(samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with masks and with log-probs of some reference near their rollout's."""
    generator = torch.Generator().manual_seed(9)
    masked = []
    for index, sample in enumerate(samples):
        apart = 0.3 * torch.randn(sample.num_scored, generator=generator)
        mask = (torch.rand(sample.num_scored, generator=generator) < 0.8).tolist() if index % 2 else []
        reference = (torch.tensor(sample.rollout_logprobs) + apart).tolist()
        masked.append(replace(sample, reference_logprobs=reference, loss_mask=mask))
    return masked


def with_scores(samples: list[TrainSample], scores: list[list[float]]) -> list[TrainSample]:
    """The samples as if their rollout had reported these log-probs."""
    return [replace(sample, rollout_logprobs=values) for sample, values in zip(samples, scores, strict=True)]


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies, which later updates leave alone."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in trainer.physical_tensors()}
