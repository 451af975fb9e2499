"""The training model in one process: options of the architecture, replay modes, what is refused, and the export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.hf_convert.directory import HFDirectory
from tests.tiny import write_olmoe
from tests.unit.megatron_side.samples import tensors_of
from tests.unit.olmoe import reference
from tests.unit.olmoe.ranks import LENGTHS, logits, make_trainer, sequences

pytestmark = pytest.mark.usefixtures("megatron")


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def reference_logits(path: Path) -> torch.Tensor:
    oracle = reference.load(path, torch.float64)
    with torch.no_grad():
        return torch.cat([reference.run(oracle, piece.tolist())[0] for piece in sequences()[0].split(LENGTHS)])


def samples_of(trainer: Any, count: int = 6, seed: int = 0) -> list[Any]:
    """Samples with the trainer's own routing and log-probs."""
    from adapters.megatron.packing import TrainSample

    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        tokens = torch.randint(0, 256, (5 + 2 * index,), generator=generator)
        with torch.no_grad():
            trainer.model(tokens[:-1], torch.tensor([0, len(tokens) - 1]))
        sample = TrainSample(
            prompt_token_ids=tokens[:3].tolist(),
            response_token_ids=tokens[3:].tolist(),
            advantage=float(torch.randn(1, generator=generator)),
            trace=trainer.model.routing.chosen(),
        )
        samples.append(replace(sample, rollout_logprobs=trainer.score([sample])[0]))
    return samples


@pytest.mark.parametrize(
    "options", [{"clip_qkv": 0.5}, {"num_key_value_heads": 2}, {"rms_norm_eps": 1e-3}, {"rope_theta": 500.0}], ids=str
)
def test_architecture_options(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each option is computed as transformers does, and changes the logits."""
    path, plain = write_olmoe(tmp_path / "a", std=0.1, **options), write_olmoe(tmp_path / "b", std=0.1)
    want = reference_logits(path)
    off = apart(logits(make_trainer(path)), want)
    print(f"{options}: {off:.1e} of {float(want.abs().max()):.1f}")
    assert off <= 2e-5, "fp32 rounding; weights five times those of the exactness checkpoint, logits of size 10"
    if "num_key_value_heads" not in options:
        assert apart(reference_logits(plain), want) > 1e-2


def test_every_parameter_is_loaded(tiny_olmoe: Path) -> None:
    """Before loading everything is NaN, and stays visible; after it every tensor is the checkpoint's, bitwise."""
    fresh = make_trainer(tiny_olmoe, load=False)
    assert all(part.isnan().all() for _, part in fresh.model.local_parts())
    assert logits(fresh).isnan().all()
    fresh.load_hf(HFDirectory(tiny_olmoe))
    stored, own = HFDirectory(tiny_olmoe), dict(fresh.physical_tensors())
    assert list(own) == list(fresh.model.physical) and own.keys() == stored.tensors.keys()
    assert all(torch.equal(own[name], stored.read(name)) for name in own)
    places = {parameter.untyped_storage().data_ptr() for parameter in fresh.model.parameters()}
    assert all(tensor.untyped_storage().data_ptr() in places for tensor in own.values()), "views, no copies"
    names = {name for name, _ in fresh.model.named_parameters()}
    assert {f"model.layers.0.mlp.experts.{part}__0__7" for part in ("gate_proj__up_proj", "down_proj")} <= names


def test_the_real_model_has_3219_names() -> None:
    """OLMoE-1B-7B built without memory: its tensors, and the keys of its checkpoint, are exactly the table's."""
    from megatron.core.dist_checkpointing.mapping import apply_factories

    from providers.olmoe.config import OlmoeConfig
    from providers.olmoe.model import build
    from tests.unit.olmoe.test_config import REAL

    def leaves(tree: Any) -> list[Any]:
        return [leaf for part in tree.values() for leaf in leaves(part)] if isinstance(tree, dict) else [tree]

    with torch.device("meta"):
        model = build(OlmoeConfig.from_hf(REAL), dtype=torch.bfloat16)
    parts = {name: tuple(part.shape) for name, part in model.local_parts()}
    wanted = {name: tensor.shape for name, tensor in model.physical.items()}
    assert len(parts) == 3219 and parts == wanted
    stored = model.sharded_state_dict()
    apply_factories(stored)
    assert {each.key: tuple(each.global_shape) for each in leaves(stored)} == wanted


@pytest.mark.parametrize("tokens_per_microbatch", [15, 60, 1000])
def test_router_losses_do_not_depend_on_micro_batches(tiny_olmoe: Path, tokens_per_microbatch: int) -> None:
    """The same metrics and weights however the samples are packed."""
    results = []
    for budget in (200, tokens_per_microbatch):
        trainer = make_trainer(tiny_olmoe)
        trainer.tokens_per_microbatch = budget
        metrics = trainer.train(samples_of(trainer))
        results.append(metrics)
    for name in ("loss", "load_balance_loss", "router_z_loss", "router_entropy", "grad_norm", "expert_load_max"):
        print(name, results[0][name], results[1][name])
        assert results[0][name] == pytest.approx(results[1][name], rel=2e-6, abs=1e-7), name


def test_losses_can_be_left_out(tiny_olmoe: Path) -> None:
    """Coefficients of 0 train on the policy alone; the losses are reported anyway."""
    from adapters.megatron.routing import RouterSettings

    norms = []
    for settings in (RouterSettings(), RouterSettings(balance_coefficient=0.0, z_coefficient=0.0)):
        trainer = make_trainer(tiny_olmoe, router=settings)
        samples = [replace(sample, advantage=0.0) for sample in samples_of(trainer)]
        metrics = trainer.train(samples)
        norms.append(metrics["grad_norm"])
        assert metrics["load_balance_loss"] > 1 and metrics["router_z_loss"] > 0
    print(norms)
    assert norms[0] > 1e-3 and norms[1] == 0


def elsewhere(samples: list[Any]) -> list[Any]:
    """The same samples, every choice of the rollout another one."""
    return [replace(sample, trace=(sample.trace + 1) % 8) for sample in samples]


def test_replay_modes(tiny_olmoe: Path) -> None:
    """rollout takes the recorded experts; trainer and none take the trainer's own, whatever was recorded."""
    from adapters.megatron.routing import RouterSettings

    found = {}
    for mode in ("rollout", "trainer", "none"):
        trainer = make_trainer(tiny_olmoe, router=RouterSettings(replay=mode))
        samples = samples_of(trainer)
        found[mode] = trainer.train(elsewhere(samples))
        if mode != "rollout":
            fresh = make_trainer(tiny_olmoe, router=RouterSettings(replay=mode))
            assert fresh.train([replace(sample, trace=None) for sample in samples]) == found[mode]
    assert found["trainer"] == pytest.approx(found["none"], rel=1e-6)
    assert found["trainer"]["routing_agreement"] == 1 and found["rollout"]["routing_agreement"] < 0.5
    assert found["trainer"]["logprob_diff_max"] < 2e-6 < 1e-4 < found["rollout"]["logprob_diff_max"]


def test_recomputation_replays(tiny_olmoe: Path) -> None:
    """With activations computed again in backward the update is the same, though routers would choose otherwise."""
    results = []
    for recompute in (False, True):
        trainer = make_trainer(tiny_olmoe, recompute=recompute)
        results.append((trainer.train(elsewhere(samples_of(trainer))), tensors_of(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], tensor) for name, tensor in results[1][1].items())


def test_refuses_what_cannot_be_replayed(tiny_olmoe: Path) -> None:
    """Unrecorded, unknown and doubled experts, other shapes, and a collapsed router: nothing is changed."""
    trainer = make_trainer(tiny_olmoe)
    samples, before = samples_of(trainer), tensors_of(trainer)

    def refused(change: Any, words: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=words):
            trainer.train([replace(sample, trace=change(sample.trace)) for sample in samples])

    refused(lambda trace: None, "sample 0: no experts were recorded")
    refused(lambda trace: trace.clone().index_fill_(0, torch.tensor([1]), 255), "position 1, layer 0: no experts")
    refused(lambda trace: trace + 8, "expected numbers in 0 .. 7")
    refused(lambda trace: trace[..., :1].expand(-1, -1, 2), "expected no one twice")
    refused(lambda trace: trace[:, :1], r"rows of shape \(1, 2\), expected \(2, 2\)")
    same = torch.tensor([3, 5])
    refused(lambda trace: same.expand_as(trace), "the router of layer 0 has collapsed", RuntimeError)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.physical_tensors())
    assert trainer.num_updates == 0


def test_bf16_follows_fp32(tiny_olmoe: Path) -> None:
    """bf16 with the experts of fp32: same next token nearly everywhere; routers decide in fp32."""
    rough = make_trainer(tiny_olmoe, dtype=torch.bfloat16)
    exact = make_trainer(tiny_olmoe)
    want = logits(exact)
    got = logits(rough, exact.model.routing.chosen())
    cosine = torch.nn.functional.cosine_similarity(got.double(), want.double(), dim=-1)
    print(f"cosine min {float(cosine.min()):.5f}")
    assert float(cosine.min()) >= 0.999
    metrics = rough.train(samples_of(rough))
    assert metrics["grad_norm"] > 0 and rough.model.lm_head.weight.dtype == torch.bfloat16


def test_export_loads_in_transformers(tiny_olmoe: Path, tmp_path: Path) -> None:
    """A trained model leaves as a directory that transformers computes with as the trainer does."""
    from adapters.hf_convert.export import export_directory

    trainer = make_trainer(tiny_olmoe)
    trainer.train(samples_of(trainer))
    export_directory(tensors=trainer.physical_tensors(), source=tiny_olmoe, destination=tmp_path / "hf")
    off = apart(logits(trainer), reference_logits(tmp_path / "hf"))
    print(f"{off:.1e}")
    assert off <= 4e-6, "fp32 rounding after one step of 1e-3"
    back = make_trainer(tmp_path / "hf")
    own, again = dict(trainer.physical_tensors()), dict(back.physical_tensors())
    assert own.keys() == again.keys() and all(torch.equal(own[name], again[name]) for name in own)
