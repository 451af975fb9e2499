"""The physical tensors of an Ouro checkpoint: their names, shapes, order and how tensor parallelism cuts them.

Import, export, publication, the training module's parameter names and the tests all read this one table. "Physical"
means as stored: a layer that runs four times is stored once.
"""

from __future__ import annotations

from adapters.physical import PhysicalTensor
from providers.ouro.config import OuroConfig

GATE = "model.early_exit_gate"
NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def physical_tensors(config: OuroConfig) -> dict[str, PhysicalTensor]:
    """All tensors of the checkpoint by Hugging Face name, in checkpoint order: 11 per layer and 5 more."""
    table = {
        "model.embed_tokens.weight": PhysicalTensor(shape=(config.vocab_size, config.hidden_size), partition_dim=0)
    }
    for layer in range(config.num_layers):
        table |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in _layer(config).items()}
    table["model.norm.weight"] = PhysicalTensor(shape=(config.hidden_size,))
    table[f"{GATE}.weight"] = PhysicalTensor(shape=(1, config.hidden_size), frozen=True)
    table[f"{GATE}.bias"] = PhysicalTensor(shape=(1,), frozen=True)
    table["lm_head.weight"] = PhysicalTensor(shape=(config.vocab_size, config.hidden_size), partition_dim=0)
    return table


def _layer(config: OuroConfig) -> dict[str, PhysicalTensor]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "self_attn.q_proj": PhysicalTensor(shape=(queries, hidden), partition_dim=0),
        "self_attn.k_proj": PhysicalTensor(shape=(keys, hidden), partition_dim=0),
        "self_attn.v_proj": PhysicalTensor(shape=(keys, hidden), partition_dim=0),
        "self_attn.o_proj": PhysicalTensor(shape=(hidden, queries), partition_dim=1),
        "mlp.gate_proj": PhysicalTensor(shape=(wide, hidden), partition_dim=0),
        "mlp.up_proj": PhysicalTensor(shape=(wide, hidden), partition_dim=0),
        "mlp.down_proj": PhysicalTensor(shape=(hidden, wide), partition_dim=1),
    }
    return parts | {norm: PhysicalTensor(shape=(hidden,)) for norm in NORMS}
