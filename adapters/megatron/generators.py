"""The random generators of a trainer process, for its checkpoints.

Every rank's states are saved. A run that goes on under the same layout takes up each rank's own; under another layout
ranks have no counterpart, and each keeps the states that its start seeded. Nothing that decides a result draws from
them: the models have no dropout, and the driver derives every sample's seed by hashing.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def states() -> ShardedObject:
    """This rank's random states, as its element of a (data-parallel, tensor-parallel) grid."""
    own = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "generators",
        [own],
        (parallel_state.get_data_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()),
        (parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=0,
    )


def restore(loaded: list[dict[str, Any]]) -> None:
    """Sets what `states` gave."""
    (own,) = loaded
    random.setstate(own["python"])
    np.random.set_state(own["numpy"])
    torch.set_rng_state(own["torch"])
    torch.cuda.set_rng_state(own["cuda"])
    get_cuda_rng_tracker().set_states(own["tracker"])
