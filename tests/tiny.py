"""Writes tiny random checkpoints, an Ouro and an OLMoE, as Hugging Face would, sharing no code with the project.

The tensor names and shapes are spelled out here once more on purpose: a mistake in the provider's table must not be
copied into the data that tests it. Every tensor is random, norms and gate included, so that no two of them can be
exchanged unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OURO_CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def ouro_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name."""
    hidden, wide, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (wide, hidden),
            f"{prefix}.mlp.up_proj.weight": (wide, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, wide),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.input_layernorm_2.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm_2.weight": (hidden,),
        }
    return shapes


OLMOE_CONFIG: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.01,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def olmoe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name."""
    hidden, wide, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.q_norm.weight": (hidden,),
            f"{prefix}.self_attn.k_norm.weight": (keys,),
            f"{prefix}.mlp.gate.weight": (config["num_experts"], hidden),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        for expert in range(config["num_experts"]):
            shapes |= {
                f"{prefix}.mlp.experts.{expert}.gate_proj.weight": (wide, hidden),
                f"{prefix}.mlp.experts.{expert}.up_proj.weight": (wide, hidden),
                f"{prefix}.mlp.experts.{expert}.down_proj.weight": (hidden, wide),
            }
    return shapes


def random_tensors(
    shapes: dict[str, tuple[int, ...]], *, seed: int, std: float, dtype: torch.dtype, gate_std: float = 0.1
) -> dict[str, torch.Tensor]:
    """Matrices ~ N(0, std), norms ~ 1 + N(0, 0.05), gates ~ N(0, gate_std) so that their decisions differ by token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.05 * noise
        else:
            value = noise * (gate_std if "early_exit_gate" in name or "mlp.gate." in name else std)
        tensors[name] = value.to(dtype)
    return tensors


def write_ouro(
    path: Path, *, seed: int = 0, std: float = 0.02, dtype: torch.dtype = torch.float32, **config_overrides: Any
) -> Path:
    """Writes config, generation config, tokenizer and one model.safetensors into `path` (made if missing).

    Args:
        std: standard deviation of the matrices; the exactness bound of 2e-6 holds at 0.02.
        config_overrides: entries of config.json to replace; sizes change the tensors too.

    Returns:
        `path`.
    """
    config = {**OURO_CONFIG, **config_overrides}
    return _write(path, config, random_tensors(ouro_shapes(config), seed=seed, std=std, dtype=dtype), dtype)


def write_olmoe(
    path: Path, *, seed: int = 0, std: float = 0.02, dtype: torch.dtype = torch.float32, **config_overrides: Any
) -> Path:
    """The same for an OLMoE; its router is wider than the rest, so that experts differ clearly between tokens."""
    config = {**OLMOE_CONFIG, **config_overrides}
    return _write(path, config, random_tensors(olmoe_shapes(config), seed=seed, std=std, dtype=dtype), dtype)


def _write(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Path:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", generation)
    write_tokenizer(path, vocab_size=config["vocab_size"], max_length=config["max_position_embeddings"])
    return path


def write_tokenizer(path: Path, *, vocab_size: int, max_length: int) -> None:
    """A word-level tokenizer in which token i is the word `t{i}`: ids and text translate by eye."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t0", "pad_token": "t0"}
    _write_json(path / "tokenizer_config.json", {**settings, "unk_token": "t1", "model_max_length": max_length})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
