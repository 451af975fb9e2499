"""The physical tensors of an OLMoE checkpoint: their names, shapes, order and how tensor parallelism cuts them.

Import, export, publication, the training module's parameters and the tests all read this one table. Experts are named
one by one, as stored; the training model and the engine hold them stacked.
"""

from __future__ import annotations

from adapters.physical import PhysicalTensor
from providers.olmoe.config import OlmoeConfig


def physical_tensors(config: OlmoeConfig) -> dict[str, PhysicalTensor]:
    """All tensors by Hugging Face name, in checkpoint order: 9 and 3 per expert in each layer, and 3 more."""
    table = {
        "model.embed_tokens.weight": PhysicalTensor(shape=(config.vocab_size, config.hidden_size), partition_dim=0)
    }
    for layer in range(config.num_layers):
        table |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in _layer(config).items()}
    table["model.norm.weight"] = PhysicalTensor(shape=(config.hidden_size,))
    table["lm_head.weight"] = PhysicalTensor(shape=(config.vocab_size, config.hidden_size), partition_dim=0)
    return table


def _layer(config: OlmoeConfig) -> dict[str, PhysicalTensor]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "self_attn.q_proj": PhysicalTensor(shape=(queries, hidden), partition_dim=0),
        "self_attn.k_proj": PhysicalTensor(shape=(keys, hidden), partition_dim=0),
        "self_attn.v_proj": PhysicalTensor(shape=(keys, hidden), partition_dim=0),
        "self_attn.o_proj": PhysicalTensor(shape=(hidden, queries), partition_dim=1),
        "self_attn.q_norm": PhysicalTensor(shape=(queries,), partition_dim=0),
        "self_attn.k_norm": PhysicalTensor(shape=(keys,), partition_dim=0),
        "mlp.gate": PhysicalTensor(shape=(config.num_experts, hidden)),
    }
    for expert in range(config.num_experts):
        prefix = f"mlp.experts.{expert}"
        # Tensor parallelism leaves experts whole: expert parallelism divides them, expert tensor parallelism cuts them.
        parts[f"{prefix}.gate_proj"] = PhysicalTensor(shape=(wide, hidden))
        parts[f"{prefix}.up_proj"] = PhysicalTensor(shape=(wide, hidden))
        parts[f"{prefix}.down_proj"] = PhysicalTensor(shape=(hidden, wide))
    norm = PhysicalTensor(shape=(hidden,))
    return parts | {"input_layernorm": norm, "post_attention_layernorm": norm}
