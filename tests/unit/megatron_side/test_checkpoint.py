"""Checkpoints in one process: into a used trainer, before the first update, of another model. See also test_ranks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

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
    path = checkpoint.save(tmp_path, trainer, {"a": [1, None]}, retention=checkpoint.Retention(keep_last=1))
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


def replicated(path: Path, **options: Any) -> Any:
    """A trainer whose moments every rank has whole."""
    from adapters.megatron.optimizer import DataParallelSettings

    return make_trainer(path, parallel=DataParallelSettings(distributed_optimizer=False), **options)


def stored(path: Path) -> dict[str, torch.Tensor]:
    from adapters.megatron.checkpoint_reader import CheckpointReader

    reader = CheckpointReader(path)
    return dict(reader.read(sorted(reader.shapes)))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["distributed", "replicated"])
@pytest.mark.parametrize("mutation", [None, "no copy"])
def test_training_goes_on_while_a_checkpoint_is_written(
    tiny_ouro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: str | None, optimizer: str
) -> None:
    """It holds the state of the moment it was begun, and is no checkpoint before it is complete.

    Mutation: without the copy of what training writes to, it holds something else.
    """
    if mutation and torch.cuda.is_available():
        pytest.skip("the copy from the device to the host cannot be left out")
    from adapters.megatron import checkpoint, checkpoint_state
    from tests.layouts.ranks import Gate

    trainer, gate = (replicated if optimizer == "replicated" else make_trainer)(tiny_ouro), Gate()
    trainer.train(make_samples(5))
    want = stored(checkpoint.save(tmp_path / "want", trainer, {}))
    if mutation:
        monkeypatch.setattr(checkpoint_state, "live_storages", lambda _: set())
    gate.close()
    pending = checkpoint.begin(tmp_path / "got", trainer, {})
    trainer.train(make_samples(5, seed=1))
    assert not pending.is_written() and checkpoint.latest(tmp_path / "got") is None
    gate.open()
    saved = pending.complete()
    assert checkpoint.latest(tmp_path / "got") == saved.path and saved.update == 1
    assert 0 < saved.stall_seconds < saved.duration_seconds
    assert same(stored(saved.path), want) == (mutation is None)


def test_a_full_disk_loses_nothing(tiny_ouro: Path, tmp_path: Path) -> None:
    """A write that fails is an error that names the checkpoint; the old one stays, space is freed, training goes on."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(tiny_ouro)
    old = checkpoint.save(tmp_path, trainer, {})
    trainer.train(make_samples(5))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, hard)
    )  # the kernel refuses what goes beyond, as a full disk does
    try:
        with pytest.raises(OSError, match="File too large: '.*iter_0000001.*distcp'") as failed:
            checkpoint.save(tmp_path, trainer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert any("iter_0000001 was not saved; older checkpoints" in note for note in failed.value.__notes__)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000000", "latest"]
    assert checkpoint.latest(tmp_path) == old
    trainer.train(make_samples(5))
    assert checkpoint.save(tmp_path, trainer, {}).name == "iter_0000002"


def test_a_directory_that_cannot_be_written_is_an_error(tiny_ouro: Path, tmp_path: Path) -> None:
    """Before anything is written."""
    from adapters.megatron import checkpoint

    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "file" / "checkpoints", make_trainer(tiny_ouro), {})


def test_a_flipped_bit_is_not_loaded(tiny_ouro: Path, tmp_path: Path) -> None:
    """The digests are compared before anything is read into the trainer."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(tiny_ouro)
    path = checkpoint.save(tmp_path, trainer, {})
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="its bytes have changed since they were written"):
        checkpoint.load(tmp_path, trainer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_layout_format(
    tiny_ouro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """It restores the same bits as the reshardable one, says which it is, and is refused on another layout."""
    from adapters.megatron import checkpoint, checkpoint_state

    trainer = make_trainer(tiny_ouro, dtype=dtype)
    trainer.train(make_samples(5))
    want = stored(checkpoint.save(tmp_path / "want", trainer, {}))
    saved = checkpoint.begin(tmp_path / "fast", trainer, {}, format="same_layout").complete()
    assert saved.format == "same_layout"
    other = make_trainer(tiny_ouro, dtype=dtype, load=False)
    checkpoint.load(tmp_path / "fast", other)
    assert same(stored(checkpoint.save(tmp_path / "again", other, {})), want)
    assert other.train(make_samples(5, seed=1)) == trainer.train(make_samples(5, seed=1))
    monkeypatch.setattr(checkpoint_state, "layout", lambda: {"tensor_parallel": 2})
    with pytest.raises(ValueError, match="layout: checkpoint .*'data_parallel': 1.*, here {'tensor_parallel': 2}"):
        checkpoint.load(tmp_path / "fast", other)


def test_another_optimizer_is_refused(tiny_ouro: Path, tmp_path: Path) -> None:
    """The distributed and the replicated one name their state differently: none may silently start afresh."""
    from adapters.megatron import checkpoint

    checkpoint.save(tmp_path, make_trainer(tiny_ouro), {})
    with pytest.raises(ValueError, match="optimizer: checkpoint 'distributed', here 'replicated'"):
        checkpoint.load(tmp_path, replicated(tiny_ouro))


def test_a_changed_schedule_must_be_asked_for(tiny_ouro: Path, tmp_path: Path) -> None:
    """Another rate than the saved one is an error; asked for, the new one counts from the next update on."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(tiny_ouro)
    trainer.train(make_samples(5))
    checkpoint.save(tmp_path, trainer, {})
    other = make_trainer(tiny_ouro, learning_rate=5e-4, weight_decay=0.1, beta2=0.95)
    before = tensors_of(other)
    with pytest.raises(ValueError, match="end_wd: checkpoint 0.0, here 0.1, max_lr: checkpoint 0.001, here 0.0005"):
        checkpoint.load(tmp_path, other)
    assert same(tensors_of(other), before), "nothing may be loaded before the check"
    checkpoint.load(tmp_path, other, has_new_schedule=True)
    groups = other.optimizer.param_groups
    assert {group["betas"] for group in groups} == {(0.9, 0.95)} and {group["step"] for group in groups} == {1}
    assert other.train(make_samples(5))["learning_rate"] == 5e-4
    assert {group["weight_decay"] for group in other.optimizer.param_groups} == {0.0, 0.1}
