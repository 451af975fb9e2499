"""Overlapped gradient reduction: when a parameter counts as ready, and that the update is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of

pytestmark = pytest.mark.usefixtures("megatron")


def overlapped(path: Path, **options: Any) -> Any:
    from adapters.megatron.optimizer import DataParallelSettings

    parallel = DataParallelSettings(overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=20_000)
    return make_trainer(path, parallel=parallel, **options)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_parameter_is_ready_once_a_microbatch_whatever_its_loops(tiny_ouro: Path, recompute: bool) -> None:
    """Megatron reduces a bucket when its parameters were ready as often as in the first update; depths differ here."""
    trainer, plain = overlapped(tiny_ouro, recompute=recompute), make_trainer(tiny_ouro, recompute=recompute)
    assert len(trainer.ddp.bucket_groups) > 3
    seen = set()
    for seed in range(3):
        samples = make_samples(7, seed=seed)
        seen.add(tuple(sorted({int(depth) for sample in samples for depth in sample.trace})))
        assert trainer.train(samples) == plain.train(samples)
        counts = [n for group in trainer.ddp.bucket_groups for n in group.per_param_grad_ready_counts.values()]
        assert counts == [1] * 36, "36 trained tensors"
    one, other = tensors_of(trainer), tensors_of(plain)
    assert all(torch.equal(one[name], other[name]) for name in one)
    shallow = [sample for sample in make_samples(30, seed=9) if len(sample.response_token_ids) == 1][:1]
    assert trainer.train(shallow)["loss"] == plain.train(shallow)["loss"], "a micro-batch of a single prompt"


def test_settings_that_contradict_each_other_are_refused() -> None:
    """A gather has nothing to wait for without the others."""
    from adapters.megatron.optimizer import DataParallelSettings

    with pytest.raises(ValueError, match="overlap_param_gather: got True, expected it only with overlap_grad_reduce"):
        DataParallelSettings(overlap_param_gather=True)
    with pytest.raises(ValueError, match="bucket_elements: got 0"):
        DataParallelSettings(bucket_elements=0)
