"""OuroConfig and the physical table: what is accepted, what is refused, and that the real sizes come out."""

import math
import subprocess
import sys

import pytest

from providers.ouro.config import OuroConfig
from providers.ouro.physical import physical_tensors

REAL = {
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
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 24,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.mark.parametrize(("layers", "values", "tensors"), [(24, 1_434_652_673, 269), (48, 2_667_974_657, 533)])
def test_published_sizes(layers: int, values: int, tensors: int) -> None:
    """The table of the 1.4B and 2.6B checkpoints has exactly their tensors and parameters."""
    config = OuroConfig.from_hf({**REAL, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers})
    table = physical_tensors(config)
    assert (len(table), sum(math.prod(t.shape) for t in table.values())) == (tensors, values)
    assert sum(math.prod(t.shape) for t in table.values() if t.frozen) == 2049


def test_reads_every_field() -> None:
    """Each field comes from its Hugging Face spelling; head_dim, dtype and eos have their defaults."""
    config = OuroConfig.from_hf(REAL)
    assert (config.num_loops, config.num_layers, config.num_heads, config.head_dim) == (4, 24, 16, 128)
    assert (config.dtype, config.eos_token_ids, config.rope_theta) == ("bfloat16", (2,), 1e6)
    short = {k: v for k, v in REAL.items() if k not in ("head_dim", "torch_dtype", "eos_token_id", "rope_theta")}
    short["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = OuroConfig.from_hf(short)
    assert (config.head_dim, config.dtype, config.eos_token_ids, config.rope_theta) == (128, "float32", (), 1e4)
    grouped = physical_tensors(OuroConfig.from_hf({**REAL, "num_key_value_heads": 4}))
    assert grouped["model.layers.0.self_attn.k_proj.weight"].shape == (512, 2048)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type: got 'llama', expected 'ouro'"]),
        ({"model_type": None, "hidden_size": None}, ["model_type", "hidden_size: got None"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings: got True"]),
        ({"num_attention_heads": 12}, ["12 * 128 = 1536, expected hidden_size = 2048"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads: got 3, expected a divisor"]),
        ({"head_dim": 64}, ["16 * 64 = 1024"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling: got type 'yarn' with ['factor']"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters: got type 'linear'"]),
        ({"rope_theta": None}, ["rope_theta: missing"]),
        ({"hidden_act": "gelu"}, ["hidden_act: got 'gelu', expected 'silu'"]),
        ({"use_sliding_window": True}, ["use_sliding_window: got True"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types: got ['sliding_attention']"]),
        ({"attention_bias": True}, ["attention_bias: got True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout: got 0.1"]),
        ({"total_ut_steps": 0}, ["total_ut_steps: got 0, expected an integer >= 1"]),
        ({"total_ut_steps": True}, ["total_ut_steps: got True"]),
        ({"early_exit_threshold": math.nan}, ["early_exit_threshold: got nan"]),
        ({"torch_dtype": "int8"}, ["torch_dtype: got 'int8'"]),
        ({"eos_token_id": [2, 49152]}, ["eos_token_id: got [49152], expected ids below vocab_size"]),
        ({"hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 3}, ["head_dim: got 3"]),
    ],
)
def test_refuses(changes: dict, words: list[str]) -> None:
    """A field that is missing, wrong or asks for another computation is named with what was expected."""
    with pytest.raises(ValueError) as caught:
        OuroConfig.from_hf({**REAL, **changes}, where="some/config.json")
    for word in ["some/config.json", *words]:
        assert word in str(caught.value)


def test_all_problems_at_once() -> None:
    """An empty config names every required field in one message."""
    with pytest.raises(ValueError, match="9 problem") as caught:
        OuroConfig.from_hf({"model_type": "ouro", "hidden_act": "silu"})
    for name in ("vocab_size", "num_hidden_layers", "rms_norm_eps", "rope_theta", "total_ut_steps"):
        assert f"{name}: missing" in str(caught.value)


def test_needs_no_torch() -> None:
    """The config and the table can be read before (or without) loading torch."""
    code = "import sys, providers.ouro.physical; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
