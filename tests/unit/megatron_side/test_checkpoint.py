"""Checkpoints in one process: into a used trainer, before the first update, of another model. See also test_ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import write_ouro
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_used_trainer_goes_back(tiny_ouro: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Loading into a trainer that has gone on restores everything, the position in a running schedule included."""
    from adapters.megatron import checkpoint

    samples = make_samples(5)
    trainer = make_trainer(tiny_ouro, dtype=dtype, lr_warmup_updates=2, lr_decay_updates=9)
    trainer.train(samples)
    path = checkpoint.save(tmp_path, trainer, {"a": [1, None]}, keep=1)
    assert path.name == "iter_0000001" and checkpoint.latest(tmp_path) == path
    first = [trainer.train(samples) for _ in range(3)], tensors_of(trainer)
    assert checkpoint.load(tmp_path, trainer) == {"a": [1, None]} and trainer.num_updates == 1
    again = [trainer.train(samples) for _ in range(3)], tensors_of(trainer)
    assert again[0] == first[0] and all(torch.equal(again[1][n], t) for n, t in first[1].items())


def test_the_caller_numbers_checkpoints(tiny_ouro: Path, tmp_path: Path) -> None:
    """iter_0000000 exists before the first update, and an update given by the caller names the directory."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(tiny_ouro)
    assert checkpoint.save(tmp_path, trainer, {}).name == "iter_0000000"
    assert checkpoint.save(tmp_path, trainer, {}, update=12).name == "iter_0000012"
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.save(tmp_path, trainer, {"tensor": torch.zeros(1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000000", "iter_0000012", "latest"]


def test_another_model_is_refused(tiny_ouro: Path, tmp_path: Path) -> None:
    """Other shapes (a vocabulary that Megatron would resize silently) and another dtype are named, not loaded."""
    from adapters.megatron import checkpoint

    checkpoint.save(tmp_path / "c", make_trainer(tiny_ouro), {})
    other = make_trainer(write_ouro(tmp_path / "model", vocab_size=128))
    before = tensors_of(other)
    with pytest.raises(ValueError, match=r"2 tensor\(s\) differ: lm_head.weight: checkpoint \[256, 128\], model \[128"):
        checkpoint.load(tmp_path / "c", other)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(other).items())
    with pytest.raises(ValueError, match="dtype: checkpoint 'float32', here 'bfloat16'"):
        checkpoint.load(tmp_path / "c", make_trainer(tiny_ouro, dtype=torch.bfloat16))


def test_nothing_to_load(tiny_ouro: Path, tmp_path: Path) -> None:
    """A directory without a complete checkpoint is an error that says so."""
    from adapters.megatron import checkpoint

    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(tmp_path, make_trainer(tiny_ouro))
