"""Builds the OLMoE demo: python -m examples.olmoe.make_demo DIR. `examples/demo.py` says what DIR holds."""

from __future__ import annotations

from typing import Any

import torch

from examples.demo import Demo, main

EMBEDDING_GAIN = 50.0
"""The warm-up starts from an embedding of size 1: at the base's 0.02 the first layer's output drowns it."""


def start(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return EMBEDDING_GAIN * tensor if name == "model.embed_tokens.weight" else tensor


def build_options() -> dict[str, Any]:
    """Supervised answers were never rolled out, so there is no routing to replay."""
    from adapters.megatron.routing import RouterSettings

    return {"router": RouterSettings(replay="none")}


DEMO = Demo(
    config={
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "clip_qkv": None, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 512,
        "norm_topk_prob": False, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_key_value_heads": 4, "output_router_logits": False, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True, "vocab_size": 320,
    },
    start=start,
    build_options=build_options,
)  # fmt: skip

if __name__ == "__main__":
    main(DEMO)
