"""The distributed optimizer's state by parameter, for a reshardable checkpoint, without copies that nobody reads.

Megatron-Core fills five buffers in host memory on the way to a whole tensor, on one rank too. There nothing has to be
gathered: the state that a rank holds is the whole tensor, and the writer's snapshot is the only copy of it.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""Masters and moments, fp32, under the names that Megatron gives them in a checkpoint."""
_ARGUMENTS = ["self", "model_sharded_state_dict", "is_loading", "metadata"]
_theirs = DistributedOptimizer.sharded_param_state_fully_reshardable


def gather_without_copies() -> None:
    """Patch: what `DistributedOptimizer` hands to a reshardable save is made by `by_parameter`. Idempotent.

    Read in Megatron-Core 0.16.1, whose own needs most of a save's time. Keys, shapes and values are the same, and so is
    the order, which its `load_parameter_state_from_fully_reshardable` follows. On one rank the template for a load is
    the optimizer's memory too, as it is the parameters'; on several it is Megatron's.
    """
    needed = ("buffers", "gbuf_ranges", "data_parallel_group", "_get_main_param_and_optimizer_states")
    source = inspect.getsource(DistributedOptimizer)
    missing = [name for name in needed if f"self.{name}" not in source]
    if (found := list(inspect.signature(_theirs).parameters)) != _ARGUMENTS or missing:
        raise ImportError(
            f"this Megatron-Core gathers the optimizer's state in another way: sharded_param_state_fully_reshardable"
            f" has {found}, expected {_ARGUMENTS}; not found: {missing}; checkpoint_gather has to follow"
        )
    DistributedOptimizer.sharded_param_state_fully_reshardable = _saved_or_template


def by_parameter(optimizer: DistributedOptimizer, model_sharded_state_dict: Any) -> dict[int, dict[str, Any]]:
    """Masters and moments of every parameter of an optimizer, whole, as sharded tensors. Collective.

    Alone in its data-parallel group a rank gets the memory that the optimizer works with, on its device, else tensors
    of host memory.
    """
    shards, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    places = {each.data: each for each in nested_values(shards)}
    state: dict[int, dict[str, Any]] = {}
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (buckets,) = ranges.values()  # of one dtype
        whole: dict[Tensor, dict[str, Tensor]] = {}
        for bucket, own in zip(buffer.buckets, buckets, strict=True):
            whole |= _of_bucket(optimizer, buffer, bucket, own["param_map"])
        for parameter in buffer.param_index_map:
            place = places[parameter]
            state[len(state)] = {kind: _placed(place, kind, tensor) for kind, tensor in whole[parameter].items()}
    return state


def _saved_or_template(
    self: DistributedOptimizer, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> Any:
    if is_loading and self.data_parallel_group.size() > 1:
        return _theirs(self, model_sharded_state_dict, is_loading, metadata)
    return by_parameter(self, model_sharded_state_dict)


def _of_bucket(
    optimizer: DistributedOptimizer, buffer: Any, bucket: Any, own: dict[Tensor, Any]
) -> dict[Tensor, dict[str, Tensor]]:
    """The flat masters and moments of a bucket's parameters. `own` says which part of which this rank holds."""
    parts = {parameter: optimizer._get_main_param_and_optimizer_states(parameter) for parameter in own}
    group = optimizer.data_parallel_group
    if group.size() == 1:
        return {parameter: {kind: part[kind].detach() for kind in KINDS} for parameter, part in parts.items()}
    whole: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in bucket.params_list}
    for kind in KINDS:
        full = torch.zeros(bucket.grad_data.numel(), dtype=torch.float32, device=bucket.grad_data.device)
        shard = full.chunk(group.size())[group.rank()].clone()
        for parameter, ranges in own.items():
            place = ranges["gbuf_local"]
            shard[place.start : place.end].copy_(parts[parameter][kind].detach())
        dist.all_gather_into_tensor(full, shard, group=group)
        full = full.cpu()
        for parameter in bucket.params_list:
            start, end, _ = buffer.param_index_map[parameter]
            whole[parameter][kind] = full[start - bucket.offset : end - bucket.offset]
    return whole


def _placed(place: Any, kind: str, tensor: Tensor) -> Any:
    """A parameter's master or moment, flat, as the sharded tensor (or factory of some) that the parameter is."""
    shaped = tensor.view(place.data.shape)
    changes = {"key": f"optimizer.state.{kind}.{place.key}", "data": shaped, "replica_id": place.replica_id}
    if not isinstance(place, ShardedTensorFactory):
        changes["dtype"] = shaped.dtype
    sharded = dataclasses.replace(place, **changes)
    sharded.validate_metadata_integrity()
    return sharded
