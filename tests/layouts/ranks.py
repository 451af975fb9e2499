"""What the processes of this folder's matrices run, see `tests.ranks`. A stage's name says what it does.

measure.MODEL.LAYOUT           scores, two updates, and a checkpoint after the first
cross.MODEL.LAYOUT             loads every crossing layout's checkpoint, saves it again, and makes the second update
whole.MODEL.RANKS.CELL         six updates in one go; a checkpoint after the third while the fourth is made
resumed.MODEL.RANKS.CELL       a fresh process goes on from the third
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.layouts.cases import CROSSING, LAYOUTS, Layout, make_trainer, samples_of

launch = partial(ranks.launch, "tests.layouts.ranks")
NUM_SAMPLES = 7

CELLS: dict[str, dict[str, Any]] = {
    f"{dtype}-{optimizer}-{how}": {
        "dtype": getattr(torch, dtype),
        "distributed_optimizer": optimizer == "distributed",
        "asynchronous": how == "async",
    }
    for dtype, optimizer, how in product(("float32", "bfloat16"), ("distributed", "replicated"), ("sync", "async"))
}
RESUME_LAYOUTS = {
    "ouro": {"1": Layout(), "2": Layout(world=2)},
    "olmoe": {"1": Layout(), "2": Layout(world=2, expert=2)},
}


def measure(model: str, name: str, folder: Path) -> dict[str, Any]:
    from adapters.megatron import checkpoint

    trainer = make_trainer(model, folder / model, layout=LAYOUTS[model][name])
    samples = samples_of(model, NUM_SAMPLES, seed=1)
    found = {"scores": trainer.score(samples), "metrics": [trainer.train(samples)]}
    checkpoint.save(folder / f"{model}.{name}", trainer, {"from": name})
    found["metrics"].append(trainer.train(samples_of(model, NUM_SAMPLES, seed=2)))
    return found


def cross(model: str, name: str, folder: Path) -> dict[str, Any]:
    """A trainer for each checkpoint: nothing of one may help another."""
    from adapters.megatron import checkpoint

    found = {}
    saved = {path.name.partition(".")[2] for path in folder.glob(f"{model}.*") if path.is_dir()}
    for source in sorted(saved & {*CROSSING[model], name}):
        other = f"{model}.{source}"
        trainer = make_trainer(model, folder / model, layout=LAYOUTS[model][name], load=False)
        checkpoint.load(folder / other, trainer)
        checkpoint.save(folder / "again" / f"{other}.{name}", trainer, {})
        found[source] = trainer.train(samples_of(model, NUM_SAMPLES, seed=2))
    return found


def whole(model: str, world: str, cell: str, folder: Path) -> list[dict[str, float]]:
    """The writing of the third update's checkpoint is held back until the fourth is made, where that is promised."""
    from adapters.megatron import checkpoint

    options = dict(CELLS[cell])
    asynchronous = options.pop("asynchronous")
    trainer = make_trainer(model, folder / model, **options, layout=RESUME_LAYOUTS[model][world], max_grad_norm=1.0)
    path, gate = folder / "runs" / f"{model}.{world}.{cell}", Gate()
    metrics = []
    for update in range(1, 7):
        metrics.append(trainer.train(samples_of(model, NUM_SAMPLES, seed=update)))
        if update == 3:
            if asynchronous:
                gate.close()
            pending = checkpoint.begin(path, trainer, {"drawn": torch.rand(1).item()})
            if not asynchronous:
                pending.complete()
        if update == 4 and asynchronous:
            assert not pending.is_written() and checkpoint.latest(path) is None
            gate.open()
            pending.complete()
    checkpoint.save(path, trainer, {"drawn": torch.rand(1).item()})
    return metrics


def resumed(model: str, world: str, cell: str, folder: Path) -> dict[str, Any]:
    from adapters.megatron import checkpoint

    options = dict(CELLS[cell])
    asynchronous = options.pop("asynchronous")
    trainer = make_trainer(
        model, folder / model, **options, layout=RESUME_LAYOUTS[model][world], max_grad_norm=1.0, load=False
    )
    source = folder / "runs" / f"{model}.{world}.{cell}"
    extra = checkpoint.load(source, trainer, path=source / "iter_0000003")
    metrics = [trainer.train(samples_of(model, NUM_SAMPLES, seed=update)) for update in range(4, 7)]
    pending = checkpoint.begin(folder / "resumed" / source.name, trainer, {"drawn": torch.rand(1).item()})
    if asynchronous:
        trainer.score(samples_of(model, 2, seed=0))
    pending.complete()
    return {"extra": extra, "metrics": metrics}


class Gate:
    """Holds back the writing of checkpoint files that begins while it is closed."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def close(self) -> None:
        from adapters.megatron import checkpoint_writer

        self._write = write = checkpoint_writer._write_file

        def held_back(*arguments: Any) -> Any:
            assert self._opened.wait(60)
            return write(*arguments)

        checkpoint_writer._write_file = held_back

    def open(self) -> None:
        from adapters.megatron import checkpoint_writer

        self._opened.set()
        checkpoint_writer._write_file = self._write


def stages() -> tuple[dict[str, Callable[[Path], Any]], dict[str, dict[str, int]]]:
    """Every stage by name, and the layout it needs."""
    functions, layouts = {}, {}
    for model, each in LAYOUTS.items():
        for name, layout in each.items():
            for kind, function in (("measure", measure), ("cross", cross)):
                stage = f"{kind}.{model}.{name}"
                functions[stage], layouts[stage] = partial(function, model, name), layout.runtime
        for world, layout in RESUME_LAYOUTS[model].items():
            for cell in CELLS:
                for kind, action in (("whole", whole), ("resumed", resumed)):
                    stage = f"{kind}.{model}.{world}.{cell}"
                    functions[stage], layouts[stage] = partial(action, model, world, cell), layout.runtime
    return functions, layouts


if __name__ == "__main__":
    ranks.run(*stages())
