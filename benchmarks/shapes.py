"""Models of published and of tiny shapes with random weights, and prompts of random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from providers.registry import provider

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OURO_1_4B: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "torch_dtype": "bfloat16",
    **_SPECIAL,
}
OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.01,
    "torch_dtype": "bfloat16",
    **_SPECIAL,
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
SHAPES: dict[str, dict[str, Any]] = {
    "ouro-1.4b": OURO_1_4B,
    "olmoe-1b-7b": OLMOE_1B_7B,
    "tiny-ouro": {**OURO_1_4B, **_TINY, "head_dim": 32, "intermediate_size": 256},
    "tiny-olmoe": {**OLMOE_1B_7B, **_TINY, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
}
"""config.json by the name of the shape."""
SHARD_BYTES = 4 << 30


def config_of(name: str) -> Any:
    """The provider's config of a shape."""
    return provider(SHAPES[name]["model_type"], "config").Config.from_hf(SHAPES[name])


def write_model(path: Path, name: str, *, norm_std: float = 0.0) -> Path:
    """Random weights at standard deviation 0.02, norms around 1, in bf16; made on the accelerator where there is one.

    One file a few gigabytes large after the other, so that no copy of the whole model is in memory. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, int] = {}
    total = size = 0

    def flush() -> None:
        save_file(files[-1], path / f"model-{len(files):05d}.safetensors", {"format": "pt"})
        files[-1] = {}

    for tensor_name, tensor in provider(shape["model_type"], "physical").physical_tensors(config_of(name)).items():
        if size > SHARD_BYTES:
            flush()
            files.append({})
            size = 0
        noise = torch.randn(tensor.shape, generator=generator, device=device)
        value = 1 + norm_std * noise if "norm" in tensor_name else 0.02 * noise
        files[-1][tensor_name] = value.to(torch.bfloat16).cpu()
        places[tensor_name] = len(files)
        size += files[-1][tensor_name].nbytes
        total += files[-1][tensor_name].nbytes
    flush()
    weight_map = {each: f"model-{place:05d}.safetensors" for each, place in places.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(shape, indent=1))
    write_tokenizer(path, shape["vocab_size"])
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Token i is the word t{i}."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t3"}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (path / "tokenizer_config.json").write_text(text)


def write_prompts(path: Path, *, vocab_size: int, count: int, length: int) -> Path:
    """Prompts of random tokens, all of one length. Returns `path`."""
    rng = random.Random(0)
    prompts = ([rng.randrange(4, vocab_size) for _ in range(length)] for _ in range(count))
    lines = [{"prompt_token_ids": prompt, "label": ""} for prompt in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def even_share(*, response_token_ids: Sequence[int], **_: Any) -> float:
    """A reward that random weights can vary in: the share of even tokens."""
    return sum(token % 2 == 0 for token in response_token_ids) / len(response_token_ids)


if __name__ == "__main__":
    import sys

    write_model(Path(sys.argv[2]), sys.argv[1])
