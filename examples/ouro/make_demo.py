"""Builds the Ouro demo: python -m examples.ouro.make_demo DIR. `examples/demo.py` says what DIR holds."""

from __future__ import annotations

import torch

from examples.demo import Demo, main

EMBEDDING_GAIN, BRANCH_GAIN = 50.0, 0.3
"""What the warm-up starts from: an embedding of size 1 and branches of size 0.3. Every branch ends in a norm, so at
the base's 0.02 the first layer's output drowns the embedding and learning takes several times as long."""


def start(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == "model.embed_tokens.weight":
        return EMBEDDING_GAIN * tensor
    return BRANCH_GAIN * tensor if "layernorm_2" in name else tensor


DEMO = Demo(
    config={
        "architectures": ["OuroForCausalLM"], "model_type": "ouro", "attention_dropout": 0.0, "bos_token_id": 1,
        "early_exit_threshold": 1.0, "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "hidden_size": 128,
        "initializer_range": 0.02, "intermediate_size": 128, "layer_types": ["full_attention"] * 3,
        "max_position_embeddings": 512, "max_window_layers": 3, "num_attention_heads": 4, "num_hidden_layers": 3,
        "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "float32",
        "total_ut_steps": 4, "use_cache": True, "use_sliding_window": False, "vocab_size": 320,
    },
    start=start,
)  # fmt: skip

if __name__ == "__main__":
    main(DEMO)
