"""What the processes of a multi-rank test run: `python -m tests.unit.megatron_side.ranks STAGE... --folder DIR`.

Every stage starts the runtime with its own layout, does its work and writes rank 0's findings to DIR/STAGE.pt; the test
reads them. A stage that fails ends its process with an error. `launch` starts the processes and waits for them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of

REPOSITORY = Path(__file__).parents[3]


def launch(stages: list[str], *, folder: Path, world: int, deadline_seconds: float = 240) -> None:
    """Runs the stages one after another in `world` processes. Raises AssertionError with the output of a failed one."""
    command = [sys.executable, "-m", "tests.unit.megatron_side.ranks", *stages, "--folder", str(folder)]
    ports = ",".join(str(port) for port in free_ports(len(stages)))
    processes = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"STAGE_PORTS": ports, "STAGE_DEADLINE": str(deadline_seconds)}
        with (folder / f"{stages[0]}.{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=deadline_seconds + 30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        output = (folder / f"{stages[0]}.{rank}.log").read_text()
        assert code == 0, f"rank {rank} of {stages} ended with {code}:\n{output[-6000:]}"


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now; one each stage, so that no rank can meet another's previous stage."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def findings(folder: Path, stage: str) -> dict[str, Any]:
    return torch.load(folder / f"{stage}.pt", weights_only=False)


def error_of(action: Callable[[], Any]) -> str:
    """The error an action raises, as text. On every rank: the ranks' texts, joined."""
    try:
        action()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return " | ".join(texts)


def measure(trainer: Any, count: int = 7) -> dict[str, Any]:
    """Scores, then an update without a clip, and the weights after it."""
    samples = make_samples(count)
    scores = trainer.score(samples)
    metrics = trainer.train(samples)
    return {"scores": scores, "metrics": metrics, "weights": tensors_of(trainer)}


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
    """Two data-parallel ranks: uneven samples, one sample, a checkpoint, and errors on one rank only."""
    from adapters.megatron import checkpoint

    found = {"seven": measure(make_trainer(folder / "model")), "one": measure(make_trainer(folder / "model"), 1)}
    trainer = make_trainer(folder / "model", load=False)
    checkpoint.load(folder / "alone", trainer)
    found["loaded"] = tensors_of(trainer)
    checkpoint.save(folder / "two_to_one", trainer, {"from": "two ranks"})
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


LAYOUTS = {tensor_parallel: 2}


def main() -> None:
    from adapters.megatron.runtime import RuntimeSettings, initialize, shutdown

    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(float(os.environ["STAGE_DEADLINE"]), exit=True)  # a hang says where
    for name, port in zip(arguments.stages, os.environ["STAGE_PORTS"].split(","), strict=True):
        stage = globals()[name]
        os.environ["MASTER_PORT"] = port
        initialize(RuntimeSettings(tensor_parallel=LAYOUTS.get(stage, 1), seed=7, deadline_seconds=60))
        found = stage(arguments.folder)
        if torch.distributed.get_rank() == 0:
            torch.save(found, arguments.folder / f"{name}.pt")
        torch.distributed.barrier()
        shutdown()


if __name__ == "__main__":
    main()
