"""OlmoeConfig and the physical table: what is accepted, what is refused, and that the real sizes come out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.hf_convert.directory import HFDirectory
from providers.olmoe.config import OlmoeConfig
from providers.olmoe.physical import physical_tensors
from tests.tiny import OLMOE_CONFIG, olmoe_shapes

REAL = {
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
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 50279,
}


def test_published_size() -> None:
    """The table of OLMoE-1B-7B has exactly its 3,219 tensors and 6.919 billion parameters, from the config alone."""
    table = physical_tensors(OlmoeConfig.from_hf(REAL))
    count = sum(math.prod(t.shape) for t in table.values())
    print(len(table), count)
    assert (len(table), count) == (3219, 6_919_161_856)
    assert not any(t.frozen for t in table.values())


def test_the_table_is_what_transformers_stores(tmp_path: Path) -> None:
    """A real OlmoeForCausalLM, saved by transformers: the same names and shapes, none more and none less."""
    transformers = pytest.importorskip("transformers")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "num_experts", "num_experts_per_tok", "max_position_embeddings")  # fmt: skip
    for kv in (4, 2):
        values = {**{n: OLMOE_CONFIG[n] for n in names}, "num_key_value_heads": kv}
        hf = transformers.OlmoeConfig(**values, pad_token_id=0, eos_token_id=0)
        transformers.OlmoeForCausalLM(hf).save_pretrained(tmp_path / str(kv))
        directory = HFDirectory(tmp_path / str(kv))
        table = physical_tensors(OlmoeConfig.from_hf(directory.config))
        directory.check({name: tensor.shape for name, tensor in table.items()})
        assert {n: t.shape for n, t in table.items()} == olmoe_shapes({**OLMOE_CONFIG, "num_key_value_heads": kv})


def test_reads_every_field() -> None:
    """Each field comes from its Hugging Face spelling; defaults are those of the published files."""
    config = OlmoeConfig.from_hf({**REAL, "clip_qkv": 8.0})
    assert (config.num_experts, config.top_k, config.num_layers, config.head_dim) == (64, 8, 16, 128)
    assert (config.dtype, config.eos_token_ids, config.clip_qkv) == ("bfloat16", (50279,), 8.0)
    short = {k: v for k, v in REAL.items() if k not in ("rope_theta", "rms_norm_eps", "num_key_value_heads")}
    config = OlmoeConfig.from_hf(short)
    assert (config.rope_theta, config.rms_norm_eps, config.num_kv_heads, config.clip_qkv) == (1e4, 1e-5, 16, None)
    config = OlmoeConfig.from_hf({**short, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob: got True, expected False"),
        ({"model_type": "olmo"}, "model_type: got 'olmo'"),
        ({"num_experts_per_tok": 65}, "expected at most num_experts = 64"),
        ({"num_experts": 256}, "expected at most 255"),
        ({"num_experts": None}, "num_experts: got None"),
        ({"clip_qkv": -1.0}, "clip_qkv: got -1.0"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "expected a divisor of num_attention_heads = 16"),
    ],
)
def test_refuses_what_it_does_not_compute(changes: dict[str, Any], words: str) -> None:
    """A field that asks for another computation is named, with what was expected."""
    with pytest.raises(ValueError) as error:
        OlmoeConfig.from_hf({**REAL, **changes})
    assert words in str(error.value)


def test_needs_no_torch() -> None:
    """Reading a config must stay cheap: neither torch nor transformers is imported."""
    code = (
        "import json, sys; from providers.olmoe.config import OlmoeConfig; import providers.olmoe.physical;"
        f"OlmoeConfig.from_hf(json.loads({json.dumps(json.dumps(REAL))}));"
        "sys.exit(bool({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
