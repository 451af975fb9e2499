"""What the framework's arguments say of model and layout, compared with the checkpoint before anything is built.

The checkpoint decides what is computed; the arguments have to agree with it, because the framework itself reads them
(sizes of its buffers, padding, logs). An argument that a framework does not have says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from adapters.hf_convert.directory import CONFIG, read_json
from adapters.parallelism import Parallelism
from adapters.physical import PhysicalTensor
from providers.registry import provider


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A checkpoint's model, without its weights."""

    path: Path
    model_type: str
    config: Any
    """The provider's."""
    table: Mapping[str, PhysicalTensor]

    @property
    def trace(self) -> Any:
        """The provider's rules of the trace."""
        return provider(self.model_type, "trace")

    @property
    def has_experts(self) -> bool:
        return hasattr(self.config, "num_experts")


@lru_cache(maxsize=4)
def read_facts(path: Path | str) -> ModelFacts:
    """The model of a Hugging Face directory.

    Raises:
        ValueError: no directory with a config.json of a model that a provider knows.
    """
    path = Path(path)
    hf = read_json(path / CONFIG)
    model_type = str(hf.get("model_type"))
    config = provider(model_type, "config").Config.from_hf(hf, where=str(path / CONFIG))
    table = provider(model_type, "physical").physical_tensors(config)
    return ModelFacts(path=path, model_type=model_type, config=config, table=table)


def facts_of(args: Any) -> ModelFacts:
    """The model that --hf-checkpoint names."""
    return read_facts(args.hf_checkpoint)


def check_arguments(args: Any, facts: ModelFacts) -> None:
    """
    Raises:
        ValueError: every disagreement with the checkpoint and every layout that the model cannot have, in one message.
    """
    problems = [*_shape_problems(args, facts), *_refused(args, facts), *_layout_problems(args, facts)]
    if problems:
        raise ValueError(f"{len(problems)} argument(s) do not fit {facts.path / CONFIG}:\n  " + "\n  ".join(problems))


def recompute(args: Any) -> bool:
    """Whether a layer's activations are computed again in backward."""
    return getattr(args, "recompute_granularity", None) == "full"


def _shape_problems(args: Any, facts: ModelFacts) -> Iterator[str]:
    for name, want in _wanted(args, facts).items():
        got = getattr(args, name, want)
        if got != want:
            yield f"--{name.replace('_', '-')}: got {got!r}, expected {want!r}"


def _wanted(args: Any, facts: ModelFacts) -> dict[str, Any]:
    config = facts.config
    wanted = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.head_dim,
        "norm_epsilon": config.rms_norm_eps,
        "layernorm_epsilon": config.rms_norm_eps,
        "rotary_base": config.rope_theta,
        # The framework takes padding off only under Megatron's own names.
        "padded_vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if getattr(args, "group_query_attention", False):
        wanted["num_query_groups"] = config.num_kv_heads
    elif config.num_kv_heads != config.num_heads:
        wanted["group_query_attention"] = True
    if not facts.has_experts:
        return wanted | {"ffn_hidden_size": config.intermediate_size, "num_experts": None}
    width = "ffn_hidden_size" if getattr(args, "moe_ffn_hidden_size", None) is None else "moe_ffn_hidden_size"
    return wanted | {
        width: config.intermediate_size,
        "num_experts": config.num_experts,
        "moe_router_topk": config.top_k,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "softmax",
        # A loss of a micro-batch's own load; what it would weigh depends on how samples are packed.
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
    }


def _refused(args: Any, facts: ModelFacts) -> Iterator[str]:
    """Arguments that ask for a computation which this model does not have."""
    reasons = {
        "fp16": "fp16 is not supported; use bf16",
        "fp8": "fp8 is not supported",
        "fp4": "fp4 is not supported",
        "mtp_num_layers": "the model has no layers for multi-token prediction",
        "allgather_cp": "there is no context parallelism",
        "tp_comm_overlap": "it needs Transformer Engine's layers",
    }
    for name, reason in reasons.items():
        if getattr(args, name, None):
            yield f"--{name.replace('_', '-')}: got {getattr(args, name)!r}: {reason}"
    if getattr(args, "recompute_granularity", None) not in (None, "full"):
        yield f"--recompute-granularity: got {args.recompute_granularity!r}, expected full or nothing"
    if getattr(args, "use_routing_replay", False) and not getattr(args, "use_rollout_routing_replay", False):
        yield "--use-routing-replay: got it without --use-rollout-routing-replay, expected both: rollouts are replayed"
    if getattr(args, "use_rollout_routing_replay", False) and not facts.has_experts:
        yield "--use-rollout-routing-replay: the model has no experts"
    if (getattr(args, "expert_tensor_parallel_size", None) or 1) != 1:
        yield (
            f"--expert-tensor-parallel-size: got {args.expert_tensor_parallel_size!r}, expected 1 (Megatron's own "
            "default is the tensor-parallel size)"
        )


def _layout_problems(args: Any, facts: ModelFacts) -> list[str]:
    def size(name: str) -> int:
        return getattr(args, name, None) or 1

    tensor, sequence = size("tensor_model_parallel_size"), bool(getattr(args, "sequence_parallel", False))
    problems = facts.config.parallel_problems(
        Parallelism(
            devices=size("world_size"),
            tensor=tensor,
            expert=size("expert_model_parallel_size"),
            pipeline=size("pipeline_model_parallel_size"),
            context=size("context_parallel_size"),
            sequence=sequence,
        )
    )
    if facts.has_experts and tensor > 1 and not sequence:
        problems.append(f"--tensor-model-parallel-size {tensor} needs --sequence-parallel with experts")
    return problems
