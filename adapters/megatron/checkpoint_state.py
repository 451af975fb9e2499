"""What a checkpoint of a trainer holds, how it describes itself, and whether a trainer can take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from adapters.megatron import generators
from adapters.megatron.trainer import Trainer

FORMAT = 2
FORMATS = {"reshardable": "fully_reshardable", "same_layout": "dp_reshardable"}
"""Our names of the two ways to store the optimizer's state, and Megatron's.

reshardable: by parameter, as the weights are; data-parallel ranks gather their parts at each save.
same_layout: each rank's part as it lies in memory, nothing is gathered; only the layout that wrote it can load it.
"""


def metadata(format: str) -> dict[str, Any]:
    """What Megatron is told about the format. A new dictionary each time: Megatron adds to it."""
    return {
        "distrib_optim_sharding_type": FORMATS[format],
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def state(trainer: Trainer, format: str, *, is_loading: bool, with_generators: bool) -> dict[str, Any]:
    """What a checkpoint holds; on loading the template that says which part this rank needs. Collective."""
    model = trainer.model.sharded_state_dict(metadata=metadata(format))
    parts = {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata(format)),
        "scheduler": trainer.scheduler.state_dict(),
        "num_updates": trainer.num_updates,
    }
    return parts | ({"generators": generators.states()} if with_generators else {})


def constants(trainer: Trainer) -> list[dict[str, Any]]:
    """Everything in the optimizer's groups that settings decide: not the parameters and not the count of steps."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in trainer.optimizer.param_groups
    ]


def check_schedule(path: Path, saved: dict[str, Any], trainer: Trainer) -> None:
    """Raises ValueError, naming each value, if a schedule was saved with other constants than the trainer's.

    Megatron itself would go on with the saved ones, whatever the trainer was made with.
    """
    own = trainer.scheduler.state_dict()
    different = sorted(name for name in own if name != "num_steps" and own[name] != saved.get(name))
    if different:
        values = ", ".join(f"{name}: checkpoint {saved.get(name)!r}, here {own[name]!r}" for name in different)
        raise ValueError(f"{path}: the schedule differs ({values}); a change must be asked for (has_new_schedule)")


def live_storages(trainer: Trainer) -> set[int]:
    """Addresses of the memory that training writes to: what is written from there in the background needs a copy."""
    tensors = list(trainer.model.parameters())
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        tensors += [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
        tensors += [each for values in part.optimizer.state.values() for each in values.values()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def layout() -> dict[str, int]:
    """How the ranks divide the work."""
    return {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel": parallel_state.get_expert_tensor_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
    }


def describe(trainer: Trainer, format: str) -> dict[str, Any]:
    """What tether.json says of a trainer's checkpoint."""
    return {
        "format": FORMAT,
        "sharding": format,
        "optimizer": "distributed" if trainer.parallel.distributed_optimizer else "replicated",
        "layout": layout(),
        "dtype": str(trainer.model.config.params_dtype).removeprefix("torch."),
        "tensors": {name: list(tensor.shape) for name, tensor in trainer.model.physical.items()},
    }


def check_loadable(path: Path, stored: dict[str, Any], trainer: Trainer) -> None:
    """Raises ValueError, with every difference, if a trainer cannot take a checkpoint.

    Megatron itself would load an embedding of another size without a word.
    """
    own = describe(trainer, stored.get("sharding", ""))
    have, want = stored.get("tensors", {}), own["tensors"]
    wrong = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
    problems = [f"{name}: checkpoint {have.get(name)}, model {want.get(name)}" for name in wrong[:10]]
    # Masters and moments of the two optimizers have other names: one would start afresh under the other's.
    fields = ["format", "dtype", "optimizer"] + (["layout"] if stored.get("sharding") == "same_layout" else [])
    for field in fields:
        if stored.get(field) != own[field]:
            problems.append(f"{field}: checkpoint {stored.get(field)!r}, here {own[field]!r}")
    if stored.get("sharding") not in FORMATS:
        problems.append(f"sharding: checkpoint {stored.get('sharding')!r}, expected one of {', '.join(FORMATS)}")
    if problems:
        raise ValueError(
            f"{path}: not a checkpoint for this trainer, {len(wrong)} tensor(s) differ: " + "; ".join(problems)
        )
