"""The provider behind the framework's forward step: what it computes, what it refuses, and the names it walks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tether.vime
from tests.contracts.vime import framework
from tests.contracts.vime.framework import Reader, Sample, load, micro_batch, model_arguments, response_logprobs, walk
from tests.tiny import olmoe_shapes, ouro_shapes
from tests.unit.olmoe.test_config import REAL as REAL_OLMOE
from tether.vime.names import hf_tensor, to_hf

pytestmark = pytest.mark.usefixtures("megatron")
BOUND = 2e-6
"""fp32, std 0.02: the same program, packed with other sequences and padding."""
LENGTHS = ((3, 5), (1, 7), (6, 1), (2, 2))
REAL_OURO = {
    "architectures": ["OuroForCausalLM"], "model_type": "ouro", "vocab_size": 49152, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "total_ut_steps": 4, "early_exit_threshold": 1.0, "attention_dropout": 0.0, "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The framework's queues of experts, one a layer."""
    module = framework.install(monkeypatch)["utils.routing_replay"]
    return module.RoutingReplay.all_routing_replays


def build(monkeypatch: pytest.MonkeyPatch, args: Any) -> Any:
    framework.provide_arguments(monkeypatch, args)
    return tether.vime.model_provider(pre_process=True, post_process=True, vp_stage=None)


def loaded(monkeypatch: pytest.MonkeyPatch, args: Any) -> Any:
    model = build(monkeypatch, args)
    load(model, Path(args.hf_checkpoint), hf_tensor)
    return model


def samples_of(model: str) -> list[Sample]:
    """Samples with recorded depths or experts."""
    draw, made = random.Random(3), []
    for index, (prompt, response) in enumerate(LENGTHS):
        sample = Sample(index=index, tokens=[draw.randrange(1, 256) for _ in range(prompt + response)])
        sample.response_length = response
        if model == "ouro":
            depths = [4] * prompt + [draw.randint(1, 4) for _ in range(response - 1)] + [1]
            sample.multimodal_train_inputs = {"execution_depths": torch.tensor(depths)}
        else:
            rows = [[draw.sample(range(8), 2) for _ in range(2)] for _ in range(prompt + response - 1)]
            sample.rollout_routed_experts = torch.tensor(rows)
        made.append(sample)
    return made


def driver_scores(path: Path, samples: list[Sample]) -> list[Tensor]:
    """The same samples scored by the driver's trainer."""
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer
    from providers.registry import provider

    directory = HFDirectory(path)
    model_type = directory.config["model_type"]
    config = provider(model_type, "config").Config.from_hf(directory.config)
    model = provider(model_type, "model").build(config, dtype=torch.float32)
    trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-3), tokens_per_microbatch=16)
    trainer.load_hf(directory)
    return [torch.tensor(scores, dtype=torch.float64) for scores in trainer.score([
        TrainSample(
            prompt_token_ids=sample.tokens[: len(sample.tokens) - sample.response_length],
            response_token_ids=sample.tokens[len(sample.tokens) - sample.response_length :],
            trace=(sample.multimodal_train_inputs or {}).get("execution_depths", torch.empty(1))[:-1]
            if sample.rollout_routed_experts is None else sample.rollout_routed_experts,
        )
        for sample in samples
    ])]  # fmt: skip


def record(routing: Any, samples: list[Sample], batch: dict[str, Any]) -> None:
    """The framework's queues for a micro-batch: a row for each last token and each padding token too."""
    rows = [torch.cat([s.rollout_routed_experts, torch.tensor([[[0, 1], [2, 3]]])]) for s in samples]
    rows.append(torch.tensor([[0, 1], [2, 3]]).expand(batch["input_ids"].shape[1] - sum(map(len, rows)), 2, 2))
    for layer, queue in enumerate(routing):
        queue.recorded.append(torch.cat(rows)[:, layer])


def apart(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("pad_to", [1, 16])
def test_depths_through_the_forward_step(
    arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tiny_ouro: Path, pad_to: int
) -> None:
    """Packed, padded, with side inputs: the driver's scores. Without the record, or with a wrong one, others."""
    model, samples = loaded(monkeypatch, arguments("ouro")), samples_of("ouro")
    batch = micro_batch(samples, pad_to=pad_to)
    with torch.no_grad():
        logits, plain = model(**batch), model(**{k: v for k, v in batch.items() if k != "execution_depths"})
        late = model(**{**batch, "execution_depths": torch.full_like(batch["execution_depths"], 3)})
    assert tuple(logits.shape) == (1, batch["input_ids"].shape[1], 256) and logits.dtype == torch.float32
    want = driver_scores(tiny_ouro, samples)
    off, uniform = apart(response_logprobs(logits, samples), want), apart(response_logprobs(plain, samples), want)
    print(f"driver against forward step: {off:.1e}; at full depth {uniform:.1e}")
    assert off <= BOUND and uniform >= 100 * BOUND and apart(response_logprobs(late, samples), want) >= 100 * BOUND


def test_experts_through_the_forward_step(
    arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tiny_olmoe: Path, routing: Any
) -> None:
    """Experts from the framework's queues, one a layer; a pass of a reference takes none."""
    model = loaded(monkeypatch, arguments("olmoe", use_rollout_routing_replay=True))
    samples = samples_of("olmoe")
    batch = micro_batch(samples, pad_to=16)
    assert len(routing) == 2
    with torch.no_grad():
        free = model(**batch)
        record(routing, samples, batch)
        monkeypatch.setenv("ROUTING_REPLAY_STAGE", "replay_forward")
        tether.vime.before_log_prob(None, [model], "")
        logits = model(**batch)
    want = driver_scores(tiny_olmoe, samples)
    off, own = apart(response_logprobs(logits, samples), want), apart(response_logprobs(free, samples), want)
    print(f"driver against forward step: {off:.1e}; by its own routing {own:.1e}")
    assert off <= BOUND and own >= 100 * BOUND and not any(queue.recorded for queue in routing)
    monkeypatch.setenv("ROUTING_REPLAY_STAGE", "fallthrough")
    with pytest.raises(ValueError, match="expected 'replay_forward'"):
        model(**batch)
    tether.vime.before_log_prob(None, [model], "ref_")
    with torch.no_grad():
        assert torch.equal(model(**batch), free)


def test_routers_that_replay_by_themselves(
    arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, routing: Any
) -> None:
    """Where the framework's Megatron has made the queues, its routers empty them: once, and not here too."""
    from megatron.core.transformer.moe.router import TopKRouter

    own, made = TopKRouter.__init__, type(routing)()

    def patched(self: Any, *given: Any, **named: Any) -> None:
        own(self, *given, **named)
        made.append(framework.routing_queue())

    monkeypatch.setattr(TopKRouter, "__init__", patched)
    model = loaded(monkeypatch, arguments("olmoe", use_rollout_routing_replay=True))
    assert len(routing) == len(made) == 2
    batch = micro_batch(samples_of("olmoe"), pad_to=16)
    record(routing, samples_of("olmoe"), batch)
    monkeypatch.setenv("ROUTING_REPLAY_STAGE", "replay_forward")
    tether.vime.before_log_prob(None, [model], "")
    with torch.no_grad():
        model(**batch)
    assert all(len(queue.recorded) == 1 for queue in routing)


def test_misalignment_is_refused(arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample without its record shifts every one behind it: never computed, whatever the padding hides."""
    model, samples = loaded(monkeypatch, arguments("ouro")), samples_of("ouro")
    for index in range(len(samples)):
        missing = [Sample(**{**vars(s), "multimodal_train_inputs": None if i == index else s.multimodal_train_inputs})
                   for i, s in enumerate(samples)]  # fmt: skip
        for pad_to in (1, 16):
            with pytest.raises(ValueError, match="execution_depths"):
                model(**micro_batch(missing, pad_to=pad_to))
    batch = micro_batch(samples, pad_to=1)
    swapped = {"execution_lengths": torch.tensor([len(samples[i].tokens) for i in (2, 1, 0, 3)])}
    with pytest.raises(ValueError, match="with another's"):
        model(**batch, **swapped)
    for wrong in ({"execution_depths": batch["execution_depths"].clamp(max=0)}, {"pixel_values": torch.zeros(1)}):
        with pytest.raises(ValueError, match="1 .. 4|pixel_values"):
            model(**{**batch, **wrong})
    for name in ("labels", "position_ids", "attention_mask"):
        with pytest.raises(ValueError, match=f"got {name}, expected None"):
            model(**{**batch, name: batch["input_ids"]})
    bare = micro_batch([Sample(**{**vars(s), "multimodal_train_inputs": None}) for s in samples], pad_to=1)
    model(**bare)  # full depth, as long as no hook has asked for records
    tether.vime.before_log_prob(None, [model], "ref_")
    with pytest.raises(ValueError, match="execution_depths: missing"):
        model(**bare)


def test_disagreements_are_told_together(arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that differs from the checkpoint and every layout that cannot be, in one message."""
    wrong = {
        "num_layers": 12, "rotary_base": 10000, "padded_vocab_size": 384, "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2, "recompute_granularity": "selective", "fp16": True, "moe_aux_loss_coeff": 0.1,
        "use_routing_replay": True, "expert_tensor_parallel_size": 2,
    }  # fmt: skip
    with pytest.raises(ValueError) as caught:
        build(monkeypatch, arguments("olmoe", **{**wrong, "rotary_base": 1000000}))
    text = str(caught.value)
    for part in ("--num-layers: got 12, expected 2", "--rotary-base", "--padded-vocab-size: got 384",
                 "pipeline parallel", "context parallel", "--recompute-granularity", "fp16", "--moe-aux-loss-coeff",
                 "--use-routing-replay", "--expert-tensor-parallel-size: got 2"):  # fmt: skip
        assert part in text, part
    framework.provide_arguments(monkeypatch, arguments("ouro"))
    for stage in ({"pre_process": False}, {"post_process": False}, {"vp_stage": 0}):
        with pytest.raises(ValueError, match="pipeline stage"):
            tether.vime.model_provider(**stage)


def test_arguments_drive_the_training_config(arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = build(monkeypatch, arguments("ouro", calculate_per_token_loss=False, recompute_granularity="full"))
    assert isinstance(model.config, TransformerConfig) and not model.config.calculate_per_token_loss
    assert model.model.recompute and model.config.params_dtype == torch.float32


def test_a_critic(arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tiny_ouro: Path) -> None:
    """The framework puts a value head on the model: the output head is gone, and values come from the same states."""
    model = build(monkeypatch, arguments("ouro"))

    class Head(torch.nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return super().forward(x), None

    model.output_layer = Head(128, 1)
    start = model.output_layer.weight.clone()
    names = {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in names and {"output_layer.weight", "output_layer.bias"} <= names
    reader = Reader(tiny_ouro)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = hf_tensor(f"module.module.{name}", reader, None)
            if name != "output_layer.weight":  # of another height: the framework leaves it
                parameter.copy_(tensor)
        values = model(**micro_batch(samples_of("ouro"), pad_to=16))
    assert torch.equal(model.output_layer.weight, start) and tuple(values.shape)[::2] == (1, 1) and values.std() > 0


@pytest.mark.parametrize("model", ["ouro", "olmoe"])
def test_there_and_back(model: str, arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and walked through the framework's path: the checkpoint's names and bits; a swapped tensor is seen."""
    args = arguments(model)
    stored = load_file(Path(args.hf_checkpoint) / "model.safetensors")
    back = dict(pair for name, tensor in walk(loaded(monkeypatch, args)) for pair in to_hf(args, name, tensor))
    assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)
    swapped = to_hf(
        args, "module.module.model.layers.0.self_attn.q_proj.weight", back["model.layers.0.self_attn.k_proj.weight"]
    )
    assert not torch.equal(swapped[0][1], stored[swapped[0][0]])


@pytest.mark.parametrize(
    ("real", "shapes", "count"),
    [(REAL_OURO, ouro_shapes, 269), (REAL_OLMOE, olmoe_shapes, 3219)],
    ids=["ouro", "olmoe"],
)
def test_all_names_of_the_real_models(
    real: dict[str, Any], shapes: Any, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ouro-1.4B and OLMoE-1B-7B, built without memory: each name once in the walk, each shape right both ways."""
    (tmp_path / "config.json").write_text(json.dumps(real))
    args = model_arguments(tmp_path, real, params_dtype=torch.bfloat16)
    with torch.device("meta"):
        model = build(monkeypatch, args)
    want = shapes(real)
    back: dict[str, tuple[int, ...]] = {}
    reader = Reader(tmp_path, {name: torch.empty(shape, device="meta") for name, shape in want.items()})
    for name, tensor in walk(model):
        assert hf_tensor(name, reader, None).shape == tensor.shape, name
        for each, part in to_hf(args, name, tensor):
            assert each not in back, each
            back[each] = tuple(part.shape)
    assert len(back) == count and back == want


def test_names_of_other_ranks(arguments: Callable[..., Any]) -> None:
    """A stack says which experts it holds, so that what another rank sends cannot be taken for one's own."""
    args = arguments("olmoe")
    stack = torch.arange(4 * 128 * 64, dtype=torch.float32).view(4, 128, 64)
    found = dict(to_hf(args, "module.module.model.layers.1.mlp.experts.down_proj__4__7", stack))
    assert list(found) == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(4, 8)]
    assert torch.equal(found["model.layers.1.mlp.experts.6.down_proj.weight"], stack[2])


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("module.module.model.layers.0.self_attn.qproj.weight", (128, 128), "no tensor of a ouro"),
        ("module.module.model.norm.weight", (127,), r"shape \(127,\), expected \(128,\)"),
    ],
)
def test_unknown_is_never_sent(arguments: Callable[..., Any], name: str, shape: tuple[int, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        to_hf(arguments("ouro"), name, torch.zeros(shape))


def test_unknown_is_never_read(tiny_ouro: Path) -> None:
    reader = Reader(tiny_ouro)
    with pytest.raises(ValueError, match="no tensor of a ouro"):
        hf_tensor("module.module.model.extra.weight", reader, SimpleNamespace())
    reader.tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(ValueError, match="model.norm.weight holds values that are not finite"):
        hf_tensor("module.module.model.norm.weight", reader, SimpleNamespace())
