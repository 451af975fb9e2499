"""Cosines and sines, against transformers' table."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from adapters.megatron.rotary import rotary_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_has_the_digits_of_the_model(dtype: torch.dtype) -> None:
    """Of the model's dtype, as transformers' and vLLM's, and held in fp32; in bf16 most values are rounded."""
    positions = torch.tensor([0, 1, 7, 512, 4095, 60_000])
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=65_536)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, dtype=dtype), positions[None])
    ours = rotary_embedding(positions, head_dim=64, theta=1e6, dtype=dtype)
    for mine, want in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and want.dtype == dtype
        assert torch.equal(mine[:, 0], want[0].float())
