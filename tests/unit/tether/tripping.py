"""What the two processes of the tripwires' test run, see `tests.ranks`. Each fault is injected on one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.ranks import findings
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of
from tether.tripwires import Tripwires, Watch

__all__ = ["findings", "launch"]
launch = partial(ranks.launch, "tests.unit.tether.tripping")
USUAL = Watch(grad_norms=[17.0] * 5)


def wires(**changed: str) -> Tripwires:
    from tether.settings import Settings

    return Tripwires.parse(Settings(**changed))  # type: ignore[arg-type]


def figures(**changed: Any) -> dict[str, Any]:
    """What rank 0 says of the rollouts of an update; the others are given it."""
    from tether.ranks import from_rank_zero

    told = {"update": 7, "reward_mean": 0.5, "entropy_estimate": 1.0, "staleness": 0}
    return from_rank_zero(lambda: {**told, **changed})


def outcome(trainer: Any, samples: Any, armed: Tripwires, watch: Watch, **changed: Any) -> dict[str, Any]:
    """What one update under these wires came to, on every rank, and whether the weights moved."""
    from tether.guard import train_on
    from tether.tripwires import TripwireStop

    before, metrics = tensors_of(trainer), figures(**changed)
    try:
        left, trips = train_on(trainer, samples, metrics, wires=armed, watch=watch)
        own: dict[str, Any] = {
            "trips": [(trip.kind, trip.action) for trip in trips], "skipped": metrics["skipped_steps"],
            "steps": metrics["num_steps"], "watch": left, "text": " ".join(metrics["tripped"]),
        }  # fmt: skip
    except TripwireStop as error:
        own = {"stopped": str(error)}
    after = tensors_of(trainer)
    own["moved"] = any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return {"ranks": every}


@contextmanager
def gradients_times(trainer: Any, factor: float) -> Iterator[None]:
    """On rank 1 alone, one parameter's gradient is multiplied."""
    here = factor if torch.distributed.get_rank() == 1 else 1.0
    handle = trainer.model.model.norm.weight.register_hook(lambda grad: grad * here)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def scores_plus(trainer: Any, shift: float) -> Iterator[None]:
    """On rank 1 alone, the trainer's log-probs are off."""
    forward, here = trainer.model.forward, shift if torch.distributed.get_rank() == 1 else 0.0
    trainer.model.forward = lambda *args, **kwargs: forward(*args, **kwargs) + here
    try:
        yield
    finally:
        trainer.model.forward = forward


def dense(folder: Path) -> dict[str, Any]:
    """Every fault but the router's, with every action that its wire can take."""
    from adapters.megatron.grpo import GrpoSettings

    samples, found = make_samples(5), {}
    trainer = make_trainer(folder / "model", grpo=GrpoSettings())
    loose = {"trip_score_difference": "stop:9"}

    def run(name: str, watch: Watch = USUAL, told: dict[str, Any] | None = None, **changed: str) -> None:
        found[name] = outcome(trainer, samples, wires(**{**loose, **changed}), watch, **(told or {}))

    run("healthy")
    with gradients_times(trainer, float("nan")):
        run("gradient, skip")
        run("gradient, stop", trip_non_finite="stop")
        run("third skip", Watch(skipped=2))
    with scores_plus(trainer, float("nan")):
        run("loss, skip")
    with gradients_times(trainer, 1e4):
        run("spike, warn")
        run("spike, skip", trip_grad_norm="skip:10")
        run("spike, stop", trip_grad_norm="stop:10")
        run("spike, off", trip_grad_norm="off")
    with scores_plus(trainer, 5.0):
        run("difference, stop", trip_score_difference="stop:1")
        run("difference, skip", trip_score_difference="skip:1")
        run("difference, warn", trip_score_difference="warn:1")
        run("difference of older weights", told={"staleness": 1}, trip_score_difference="stop:1")
    fallen = Watch(rewards=[0.9, 0.9, 0.2, 0.1], best_reward=0.9, least_reward=0.1)
    for action in ("warn", "skip", "stop"):
        run(f"reward, {action}", fallen, {"reward_mean": 0.1}, trip_reward=f"{action}:0.4")
        run(f"entropy, {action}", told={"entropy_estimate": 1e-3}, trip_entropy=f"{action}:0.01")
    run("healthy again")
    return found


def routed(folder: Path) -> dict[str, Any]:
    """The routers of rank 1 send every token to the same experts; the loads are reduced over both ranks."""
    from tests.unit.olmoe.ranks import make_trainer as olmoe_trainer

    def run(action: str) -> dict[str, Any]:
        from adapters.megatron.routing import RouterSettings

        router = RouterSettings(replay="none", least_effective_experts=3.25 * 2)
        trainer = olmoe_trainer(folder / "olmoe", router=router)
        if torch.distributed.get_rank() == 1 and action != "healthy":
            for layer in trainer.model.model.layers:
                with torch.no_grad():
                    layer.mlp.gate.weight.copy_(1e-3 * torch.arange(8.0)[:, None].expand_as(layer.mlp.gate.weight))
        armed = wires(trip_score_difference="off", trip_router="stop:3.25" if action == "healthy" else f"{action}:3.25")
        return outcome(trainer, make_samples(6, traced=False), armed, USUAL)

    return {action: run(action) for action in ("healthy", "stop", "skip")}


STAGES: list[Callable[[Path], Any]] = [dense, routed]


if __name__ == "__main__":
    ranks.run({stage.__name__: stage for stage in STAGES}, {})
