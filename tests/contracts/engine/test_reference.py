"""The reference policy scored by an engine of its own is the one that the trainer scores with exchanged weights."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.contract import EngineError
from adapters.hf_convert.directory import HFDirectory
from adapters.vllm_engine.client.local import LocalEngine
from providers.registry import provider
from tests.contracts.engine.conftest import settings_for
from tests.unit.megatron_side.samples import make_samples
from tether.reference import EngineReference

pytestmark = pytest.mark.usefixtures("megatron")
BOUND = 2e-6
"""fp32 rounding of two correct programs at std 0.02, as of trainer and engine on the same weights."""


def samples_for(config: Any) -> list[Any]:
    """Random tokens at two temperatures; mixed depths, or experts drawn anew for every token and layer."""
    samples = make_samples(9, longest=24)
    if not hasattr(config, "num_experts"):
        return samples
    generator = torch.Generator().manual_seed(3)

    def experts(count: int) -> torch.Tensor:
        drawn = torch.rand(count, config.num_layers, config.num_experts, generator=generator)
        return drawn.topk(config.top_k).indices

    return [replace(sample, trace=experts(sample.num_inputs)) for sample in samples]


def test_engine_and_trainer_score_the_same_reference(models: dict[str, Path], tmp_path: Path) -> None:
    """Through the traces of the policy's samples; also by an engine that was killed; a sample that fails is named."""
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.reference import ReferencePolicy
    from adapters.megatron.trainer import Trainer

    own, directory = HFDirectory(models["A"]), HFDirectory(models["B"])
    kind = own.config["model_type"]
    config = provider(kind, "config").Config.from_hf(own.config)
    model = provider(kind, "model").build(config, dtype=torch.float32)
    trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-4), tokens_per_microbatch=60)
    trainer.load_hf(own)
    samples = samples_for(config)
    policy, reference = trainer.score(samples), ReferencePolicy(trainer, directory).score(samples)
    untraced = ReferencePolicy(trainer, directory).score([replace(sample, trace=None) for sample in samples])
    job: Any = SimpleNamespace(part=lambda name: provider(kind, name))
    with LocalEngine(settings_for(models["B"], tmp_path / "log", max_model_len=64)) as engine:
        scorer = EngineReference(job, engine)
        scores = scorer.score(samples)
        off = apart(scores, reference)
        print(f"{kind}: max {off.max():.1e} mean {off.mean():.1e} count {len(off)} first {off[:5].tolist()}")
        assert off.max() <= BOUND
        for wrong in (policy, untraced):  # other weights, or a trace that is ignored
            assert apart(wrong, reference).max() > 100 * BOUND
        os.kill(engine.pid, signal.SIGKILL)
        assert apart(scorer.score(samples), reference).max() <= BOUND
        too_long = replace(samples[0], prompt_token_ids=[3] * 80, trace=None)
        with pytest.raises(EngineError, match="1 samples could not be scored, the first: reference/1"):
            scorer.score([samples[1], too_long])


def apart(one: list[list[float]], other: list[list[float]]) -> torch.Tensor:
    assert [len(row) for row in one] == [len(row) for row in other]
    return torch.tensor([abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)])
