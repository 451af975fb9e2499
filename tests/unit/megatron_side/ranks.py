"""What the processes of this folder's multi-rank tests run, see `tests.ranks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.ranks import error_of, findings
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of, with_reference

__all__ = ["findings", "launch"]
launch = partial(ranks.launch, "tests.unit.megatron_side.ranks")


def measure(trainer: Any, count: int = 7) -> dict[str, Any]:
    """Scores, then an update without a clip, and the weights after it."""
    samples = make_samples(count)
    scores = trainer.score(samples)
    metrics = trainer.train(samples)
    return {"scores": scores, "metrics": metrics, "weights": tensors_of(trainer)}


LOSSES: dict[str, dict[str, Any]] = {
    "by sequence": {"loss": "gspo", "normalisation": "sequence", "kl_coefficient": 0.1, "entropy_coefficient": 0.05},
    "two passes of two": {"mini_batches": 2, "epochs": 2, "clip_low": 1e-3, "clip_high": 1e-3},
}


def losses(folder: Path) -> dict[str, Any]:
    """Updates with other losses than the plain one, with masks."""
    from adapters.megatron.grpo import GrpoSettings

    found = {}
    for name, options in LOSSES.items():
        # Adam's first steps are lr * sign(g), so noise that differs in sign moves a weight by lr: a small one keeps the
        # later steps' losses comparable.
        trainer = make_trainer(folder / "model", grpo=GrpoSettings(**options), learning_rate=1e-4)
        found[name] = trainer.train(with_reference(make_samples(7)))
    return found


def alone(folder: Path) -> dict[str, Any]:
    """The yardstick: one process, and its checkpoints before and after two updates."""
    from adapters.megatron import checkpoint

    found = {"seven": measure(make_trainer(folder / "model")), "one": measure(make_trainer(folder / "model"), 1)}
    trainer = make_trainer(folder / "model")
    checkpoint.save(folder / "alone", trainer, {"position": 0})
    before = tensors_of(trainer)
    for seed in (1, 2):
        trainer.train(make_samples(5, seed=seed))
    checkpoint.save(folder / "alone", trainer, {"position": 10, "version": [1, 2]})
    saved = tensors_of(trainer)
    drawn = torch.rand(3)
    metrics = trainer.train(make_samples(5, seed=3))
    found["losses"] = losses(folder)
    return {
        **found, "before": before, "saved": saved, "drawn": drawn, "metrics": metrics, "after": tensors_of(trainer)
    }  # fmt: skip


def resumed(folder: Path) -> dict[str, Any]:
    """A fresh process goes on from `alone`."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(folder / "model", load=False)
    extra = checkpoint.load(folder / "alone", trainer)
    found = {"extra": extra, "num_updates": trainer.num_updates, "saved": tensors_of(trainer), "drawn": torch.rand(3)}
    checkpoint.save(folder / "again", trainer, extra)
    found["metrics"] = trainer.train(make_samples(5, seed=3))
    return {**found, "after": tensors_of(trainer)}


def data_parallel(folder: Path) -> dict[str, Any]:
    """Two data-parallel ranks: uneven samples, one sample, checkpoints, and errors on one rank only."""
    from adapters.megatron import checkpoint
    from adapters.megatron.optimizer import DataParallelSettings

    found = {"seven": measure(make_trainer(folder / "model")), "one": measure(make_trainer(folder / "model"), 1)}
    found["losses"] = losses(folder)
    trainer = make_trainer(folder / "model", load=False)
    checkpoint.load(folder / "alone", trainer)
    found["loaded"] = tensors_of(trainer)
    checkpoint.save(folder / "two_to_one", trainer, {"from": "two ranks"})
    parallel = DataParallelSettings(overlap_grad_reduce=True, overlap_param_gather=True, bucket_elements=20_000)
    in_buckets = make_trainer(folder / "model", load=False, parallel=parallel)
    checkpoint.load(folder / "alone", in_buckets)
    found["buckets"] = len(in_buckets.ddp.buffers[0].buckets)
    checkpoint.save(folder / "in_buckets", in_buckets, {})
    found |= _errors(trainer)
    found["after errors"] = trainer.train(make_samples(5, seed=3))
    return found


def _errors(trainer: Any) -> dict[str, Any]:
    rank, samples = torch.distributed.get_rank(), make_samples(5, seed=3)
    bad = [*samples[:4], make_samples(1, seed=9)[0].__class__(prompt_token_ids=[], response_token_ids=[1])]
    forward = trainer.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("broken on purpose")

    found = {
        "bad sample": error_of(lambda: trainer.train(bad if rank == 1 else samples)),
        "other samples": error_of(lambda: trainer.train(samples[::-1] if rank == 1 else samples)),
    }
    if rank == 1:
        trainer.model.forward = broken
    found["broken forward"] = error_of(lambda: trainer.train(samples))
    found["broken score"] = error_of(lambda: trainer.score(samples))
    trainer.model.forward = forward
    weight = trainer.model.model.norm.weight
    handle = weight.register_hook(lambda grad: grad * (float("nan") if rank == 1 else 1))
    found["broken gradient"] = error_of(lambda: trainer.train(samples))
    handle.remove()
    return found


def tensor_parallel(folder: Path) -> dict[str, Any]:
    """Two tensor-parallel ranks: the same update, also with sequence parallelism, and a checkpoint."""
    from adapters.megatron import checkpoint

    found = {"seven": measure(make_trainer(folder / "model")), "one": measure(make_trainer(folder / "model"), 1)}
    found["losses"] = losses(folder)
    found["sequence"] = measure(make_trainer(folder / "model", sequence_parallel=True, recompute=True))
    found["bf16"] = measure(make_trainer(folder / "model", dtype=torch.bfloat16))["metrics"]
    trainer = make_trainer(folder / "model", load=False)
    checkpoint.load(folder / "alone", trainer)
    found["loaded"] = tensors_of(trainer)
    checkpoint.save(folder / "halves", trainer, {"from": "two halves"})
    return found


def from_halves(folder: Path) -> dict[str, Any]:
    """One process takes over what two data-parallel and two tensor-parallel ranks saved, and saves it again."""
    from adapters.megatron import checkpoint

    found = {}
    for name in ("two_to_one", "halves"):
        trainer = make_trainer(folder / "model", load=False)
        found[name] = {"extra": checkpoint.load(folder / name, trainer), "weights": tensors_of(trainer)}
        checkpoint.save(folder / f"{name}_again", trainer, {})
        found[name]["metrics"] = trainer.train(make_samples(5, seed=3))
    return found


STAGES: list[Callable[[Path], Any]] = [alone, resumed, data_parallel, tensor_parallel, from_halves]


if __name__ == "__main__":
    ranks.run({stage.__name__: stage for stage in STAGES}, {"tensor_parallel": {"tensor_parallel": 2}})
