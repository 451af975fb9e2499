"""Megatron-Core as the trainer: runtime, parallel parts, packing, replay attention, GRPO, optimizer, checkpoints.

Names no model: a provider builds its module tree from these parts and hands it to `Trainer`.
"""
