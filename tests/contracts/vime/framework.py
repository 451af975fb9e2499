"""The framework as its interface is documented, small: what Tether's hooks are called with and what they may lean on.

Written from the interface, sharing no code with it. tests/contracts/vime/test_slime.py runs the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file
from torch import Tensor

PACKAGE = "slime"


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields of a sample that hooks read or set."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None

    def get_reward_value(self, args: Any) -> float:
        return self.reward if not args.reward_key else self.reward[args.reward_key]


class Reader:
    """A directory's tensors by name."""

    def __init__(self, path: Path, tensors: dict[str, Tensor] | None = None) -> None:
        self.path = path
        self.tensors = load_file(path / "model.safetensors") if tensors is None else tensors

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def model_arguments(path: Path, config: dict[str, Any], **overrides: Any) -> SimpleNamespace:
    """The framework's arguments for a model, right in every field that is compared."""
    values = {
        "hf_checkpoint": str(path),
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": False,
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "norm_epsilon": config["rms_norm_eps"],
        "rotary_base": int(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "num_experts": None,
        "world_size": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": torch.float32,
        "fp16": False,
        "recompute_granularity": None,
        "calculate_per_token_loss": False,
        "use_rollout_routing_replay": False,
    }
    if "num_experts" in config:
        values |= {
            "num_experts": config["num_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["intermediate_size"],
            "moe_router_pre_softmax": True,
            "moe_router_score_function": "softmax",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
            "expert_tensor_parallel_size": 1,
        }
    return SimpleNamespace(**{**values, **overrides})


def provide_arguments(monkeypatch: pytest.MonkeyPatch, args: Any) -> None:
    """What `megatron.training.get_args()` gives in a training process."""
    module = ModuleType("megatron.training")
    module.get_args = lambda: args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", module)


def install(monkeypatch: pytest.MonkeyPatch, **parts: ModuleType) -> dict[str, ModuleType]:
    """The framework's package with its two tables of conversions and its routing queues."""
    modules = {
        "backends.megatron_utils.hf_to_megatron": _readers(),
        "backends.megatron_utils.megatron_to_hf": _writers(),
        "utils.routing_replay": _routing(),
    } | {name.replace("__", "."): module for name, module in parts.items()}
    for name, module in modules.items():
        whole = f"{PACKAGE}.{name}"
        monkeypatch.setitem(sys.modules, whole, module)
        while "." in whole:
            whole = whole.rpartition(".")[0]
            if whole not in sys.modules:
                package = ModuleType(whole)
                package.__path__ = []
                monkeypatch.setitem(sys.modules, whole, package)
    return modules


def _readers() -> ModuleType:
    module = ModuleType("hf_to_megatron")

    def load_hf_weights(args: Any, model: Any, path: Any) -> None: ...

    module._LOADERS, module.load_hf_weights = {"llama": object()}, load_hf_weights  # type: ignore[attr-defined]
    return module


def _writers() -> ModuleType:
    module = ModuleType("megatron_to_hf")

    def _convert_to_hf_core(args: Any, model_name: str, name: str, param: Tensor) -> list[tuple[str, Tensor]]:
        return [(f"{model_name}:{name}", param)]

    source = "def convert_to_hf(args, model_name, name, param, q=None, t=True):\n"
    source += "    return _convert_to_hf_core(args, model_name, name, param)\n"
    module._convert_to_hf_core = _convert_to_hf_core  # type: ignore[attr-defined]
    exec(source, module.__dict__)  # looked up in the module at every call
    return module


def routing_queue() -> Any:
    """A queue as the framework's patched Megatron makes one in each router."""
    return sys.modules[f"{PACKAGE}.utils.routing_replay"].RoutingReplay()  # type: ignore[attr-defined]


def _routing() -> ModuleType:
    module = ModuleType("routing_replay")

    class RoutingReplay:
        all_routing_replays: list[Any] = []

        def __init__(self) -> None:
            self.recorded: list[Tensor] = []
            RoutingReplay.all_routing_replays.append(self)

        def pop_forward(self) -> Tensor:
            return self.recorded.pop(0).to(torch.int32)

    module.RoutingReplay = RoutingReplay  # type: ignore[attr-defined]
    return module


def micro_batch(samples: Sequence[Sample], *, pad_to: int) -> dict[str, Any]:
    """Keywords of the forward pass: samples packed and padded; side inputs concatenated, absent ones skipped."""
    lengths = [len(sample.tokens) for sample in samples]
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    padding = -boundaries[-1] % pad_to
    tokens = F.pad(torch.tensor([t for sample in samples for t in sample.tokens]), (0, padding))
    mask = torch.cat([
        F.pad(torch.tensor(s.loss_mask or [1] * s.response_length), (len(s.tokens) - s.response_length - 1, 1))
        for s in samples
    ])  # fmt: skip
    if padding:
        boundaries.append(boundaries[-1] + padding)
    side: dict[str, Tensor] = {}
    for sample in samples:
        for name, value in (sample.multimodal_train_inputs or {}).items():
            side[name] = torch.cat([side[name], value]) if name in side else value
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    return {
        "input_ids": tokens[None],
        "position_ids": None,
        "attention_mask": None,
        "labels": None,
        "packed_seq_params": PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens),
        "loss_mask": F.pad(mask, (0, padding))[None],
        **side,
    }


def response_logprobs(logits: Tensor, samples: Sequence[Sample]) -> list[Tensor]:
    """Log-probs of response tokens, from the logits of the token before each."""
    found, start = [], 0
    for sample in samples:
        first, end = start + len(sample.tokens) - sample.response_length, start + len(sample.tokens)
        rows = logits[0, first - 1 : end - 1].log_softmax(-1)
        found.append(rows.gather(1, torch.tensor(sample.tokens[first - start :])[:, None])[:, 0])
        start = end
    return found


def load(model: Any, path: Path, read: Callable[[str, Any, Any], Tensor]) -> None:
    """One parameter after another, by the name under the wrappers."""
    reader = Reader(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(f"module.module.{name}", reader, None))


def walk(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What is sent: every parameter by the name under the wrappers."""
    for name, parameter in model.named_parameters():
        assert hasattr(parameter, "tensor_model_parallel"), name
        yield f"module.module.{name}", parameter.detach()
