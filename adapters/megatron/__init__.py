"""Megatron-Core as the trainer: runtime, parallel parts, packing, replay attention, GRPO, optimizer, checkpoints.

Names no model: a provider builds its module tree from these parts and hands it to `Trainer`.
"""

import warnings

# Megatron-Core says so once a module at import; running without them is the normal case here.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
warnings.filterwarnings("ignore", message="full scope is deprecated")
