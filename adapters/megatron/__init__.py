"""Megatron-Core as the trainer: runtime, parallel parts, packing, replay attention, GRPO, optimizer, checkpoints.

Names no model: a provider builds its module tree from these parts and hands it to `Trainer`.
"""

import warnings

# Megatron-Core says these at every start; running without TE and apex is the normal case here.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",  # the shards of the distributed optimizer are views
    "`load_state_dict` is deprecated",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)
