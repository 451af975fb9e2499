"""One process: updates, scores and weights of the trainer, against plain PyTorch and against itself cut differently."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.megatron.grpo import GrpoSettings
from adapters.megatron.mismatch import MismatchSettings
from tests.unit.megatron_side.plain_loss import whole_loss
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of, with_reference, with_scores
from tests.unit.ouro import reference

pytestmark = pytest.mark.usefixtures("megatron")


def gradients(trainer: Any) -> dict[str, Tensor]:
    return {n: p.main_grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def worst_relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest value."""
    return max(float((got[n].double() - want[n].double()).abs().max() / want[n].abs().max()) for n in want)


def plain_update(path: Path, samples: Any, settings: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one update in fp64 plain PyTorch."""
    config = json.loads((path / "config.json").read_text())
    weights = {n: t.double().requires_grad_() for n, t in load_file(path / "model.safetensors").items()}
    scores, entropies = [], []
    for s in samples:
        tokens = [*s.prompt_token_ids, *s.response_token_ids]
        logits = reference.logits(weights, config, tokens[:-1], s.trace.tolist())[len(s.prompt_token_ids) - 1 :]
        table = (logits / s.temperature).log_softmax(-1)
        scores.append(list(table[range(s.num_scored), list(s.response_token_ids)]))
        entropies.append(list(-(table.exp() * table).sum(-1)))
    loss = whole_loss(samples, scores, settings, entropies)
    loss.backward()
    return float(loss.detach()), {n: w.grad for n, w in weights.items() if w.grad is not None}


UNCORRECTED = {"old_policy": "rollout", "mismatch": MismatchSettings(correction="none")}
LOSSES: dict[str, dict[str, Any]] = {
    "clip by token": UNCORRECTED,
    "gspo with k3": {
        "loss": "gspo",
        "normalisation": "sequence",
        "clip_low": 0.02,
        "clip_high": 0.02,
        "kl_coefficient": 0.1,
        **UNCORRECTED,
    },
    "cispo with entropy": {"loss": "cispo", "entropy_coefficient": 0.05, **UNCORRECTED},
    "constant, corrected": {
        "normalisation": "constant",
        "constant_tokens": 12,
        "kl_coefficient": 0.1,
        "kl_estimator": "k2",
        "mismatch": MismatchSettings(correction="token_mask", low=0.9, high=1.1),
    },
}


@pytest.mark.parametrize("name", LOSSES)
def test_update_equals_plain_pytorch(tiny_ouro: Path, name: str) -> None:
    """Loss, gradients and gradient norm of an update are those of the formula, in fp64, over all samples at once."""
    settings = GrpoSettings(**LOSSES[name])
    samples = make_samples(7) if name == "clip by token" else with_reference(make_samples(9, seed=2))
    loss, want = plain_update(tiny_ouro, samples, settings)
    trainer = make_trainer(tiny_ouro, max_grad_norm=0.0, grpo=settings)
    metrics = trainer.train(samples)
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in want.values()))
    error = worst_relative(gradients(trainer), want)
    print(f"loss {metrics['loss']:.8f} plain {loss:.8f}; norm {metrics['grad_norm']:.7f} plain {norm:.7f}; "
          f"gradients {error:.1e} over {len(want)} tensors")  # fmt: skip
    exercised = "mismatch_bound_fraction" if settings.old_policy == "trainer" else "clip_fraction"
    assert 0 < metrics[exercised] < 1, "the samples must exercise the clip, or the mask"
    assert abs(metrics["loss"] - loss) < 1e-6 * max(1, abs(loss))
    assert abs(metrics["grad_norm"] / norm - 1) < 1e-6
    assert set(gradients(trainer)) == set(want)
    assert error < 6e-6  # fp32 rounding over 4 loops and a backward; a wrong normaliser or temperature is off by 1e-1


def test_metrics_say_what_happened(tiny_ouro: Path) -> None:
    """Score differences are trainer minus rollout, overall and by the depth that was run; token counts are exact."""
    samples = make_samples(7)
    trainer = make_trainer(tiny_ouro)
    scores = trainer.score(samples)
    metrics = trainer.train(samples)
    apart = [
        [abs(a - b) for a, b in zip(x, s.rollout_logprobs, strict=True)] for x, s in zip(scores, samples, strict=True)
    ]
    flat = [value for row in apart for value in row]
    assert metrics["num_tokens"] == len(flat) and metrics["num_input_tokens"] == sum(s.num_inputs for s in samples)
    assert metrics["logprob_diff_mean"] == pytest.approx(sum(flat) / len(flat), rel=1e-6)
    assert metrics["logprob_diff_max"] == pytest.approx(max(flat), rel=1e-6)
    depths = [int(d) for s in samples for d in s.trace[len(s.prompt_token_ids) - 1 :]]
    for depth in range(1, 5):
        here = [value for value, d in zip(flat, depths, strict=True) if d == depth]
        assert metrics[f"num_tokens_depth_{depth}"] == len(here)
        assert metrics[f"logprob_diff_mean_depth_{depth}"] == pytest.approx(sum(here) / len(here), rel=1e-6)
        assert metrics[f"logprob_diff_max_depth_{depth}"] == pytest.approx(max(here), rel=1e-6)
    assert metrics["learning_rate"] == 1e-3 and trainer.num_updates == 1


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "full depth"])
def test_scores_are_those_that_training_starts_from(tiny_ouro: Path, traced: bool) -> None:
    """`score` equals the log-probs inside `train` bit for bit: the ratio is exactly 1 on the trainer's own scores."""
    samples = make_samples(7, traced=traced)
    trainer = make_trainer(tiny_ouro)
    samples = with_scores(samples, trainer.score(samples))
    metrics = trainer.train(samples)
    weighted = sum(s.advantage * s.num_scored for s in samples) / metrics["num_tokens"]
    print(f"logprob_diff_max {metrics['logprob_diff_max']:.1e}, loss {metrics['loss']:.8f}, expected {-weighted:.8f}")
    assert metrics["logprob_diff_max"] == 0.0 and metrics["ratio_mean"] == 1.0 and metrics["clip_fraction"] == 0.0
    assert metrics["loss"] == pytest.approx(-weighted, rel=1e-6)


def test_scores_do_not_depend_on_packing(tiny_ouro: Path) -> None:
    """One by one, in small and in large micro-batches: only the rounding of other matrix shapes differs."""
    samples = make_samples(9)
    runs = [make_trainer(tiny_ouro, tokens_per_microbatch=budget).score(samples) for budget in (30, 60, 4096)]
    alone = make_trainer(tiny_ouro)
    runs.append([alone.score([sample])[0] for sample in samples])
    first = torch.tensor([x for row in runs[0] for x in row])
    apart = [float((torch.tensor([x for row in run for x in row]) - first).abs().max()) for run in runs[1:]]
    print(f"largest difference to the smallest micro-batches: {apart}, of {len(first)} scores")
    assert max(apart) <= 2e-6  # two units in the last place of a log-prob near -5.5 are 1e-6


def test_update_does_not_depend_on_the_cut(tiny_ouro: Path) -> None:
    """Loss and gradients of one update are the same for every budget, with empty-handed and with full micro-batches."""
    samples = make_samples(9, seed=3)
    runs = []
    for budget in (25, 60, 4096):
        trainer = make_trainer(tiny_ouro, tokens_per_microbatch=budget, max_grad_norm=0.0)
        runs.append((trainer.train(samples), gradients(trainer)))
    (metrics, want), *others = runs
    for other, found in others:
        error, loss = worst_relative(found, want), abs(other["loss"] - metrics["loss"])
        print(f"gradients {error:.1e}, loss {loss:.1e}, grad_norm {abs(other['grad_norm'] - metrics['grad_norm']):.1e}")
        assert error < 1e-6 and loss < 1e-6  # another order of fp32 sums; a per-micro-batch mean is off by 1e-1


def test_recompute_gives_the_same_update(tiny_ouro: Path) -> None:
    """With every layer recomputed the updated weights are bitwise the same."""
    samples = make_samples(5)
    updated = []
    for recompute in (False, True):
        trainer = make_trainer(tiny_ouro, recompute=recompute)
        trainer.train(samples)
        updated.append(tensors_of(trainer))
    assert all(torch.equal(updated[1][name], tensor) for name, tensor in updated[0].items())


def test_gate_is_frozen_and_the_rest_moves(tiny_ouro: Path) -> None:
    """The early-exit gate stays bitwise, has no optimizer state, and every other tensor changes."""
    trainer = make_trainer(tiny_ouro)
    before = tensors_of(trainer)
    trainer.train(make_samples(5))
    after = tensors_of(trainer)
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == ["model.early_exit_gate.weight", "model.early_exit_gate.bias"]
    sizes = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    assert sizes == sum(t.numel() for t in before.values()) - 129


def test_weights_go_in_and_out_bitwise(tiny_ouro: Path) -> None:
    """load_hf and physical_tensors are inverse, in checkpoint order."""
    trainer = make_trainer(tiny_ouro)
    stored = load_file(tiny_ouro / "model.safetensors")
    out = tensors_of(trainer)
    assert list(out) == list(trainer.model.physical) and set(out) == set(stored)
    assert all(torch.equal(out[name], tensor) for name, tensor in stored.items())


def test_clipping_and_schedule(tiny_ouro: Path) -> None:
    """The reported norm is the one before clipping; warm-up starts above 0 and the cosine ends at the minimum."""
    samples = make_samples(5)
    free = make_trainer(tiny_ouro, max_grad_norm=0.0).train(samples)
    options = {"max_grad_norm": free["grad_norm"] / 4, "learning_rate": 8e-4, "min_learning_rate": 1e-4}
    trainer = make_trainer(tiny_ouro, lr_warmup_updates=2, lr_decay_updates=4, **options)
    rates, first = [], trainer.train(samples)
    assert first["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-6)
    left = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients(trainer).values()))
    assert left == pytest.approx(free["grad_norm"] / 4, rel=1e-5)
    rates = [first["learning_rate"]] + [trainer.train(samples)["learning_rate"] for _ in range(5)]
    print("learning rates", rates)
    assert rates == pytest.approx([4e-4, 6e-4, 8e-4, 4.5e-4, 1e-4, 1e-4], rel=1e-6)


def test_adam_is_torch_adamw() -> None:
    """Five steps with decay are bitwise those of torch.optim.AdamW."""
    from adapters.megatron.optimizer import Adam

    start = torch.randn(40, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    a, b = Adam([ours], **options), torch.optim.AdamW([theirs], **options)
    for step in range(5):
        gradient = torch.randn(40, generator=torch.Generator().manual_seed(step))
        for parameter, optimizer in ((ours, a), (theirs, b)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours, theirs) and a.param_groups[0]["step"] == 5


def test_non_finite_gradients_change_nothing(tiny_ouro: Path) -> None:
    """A gradient that is not a number is refused by name; weights, moments and schedule stay."""
    samples = make_samples(5)
    trainer, twin = make_trainer(tiny_ouro), make_trainer(tiny_ouro)
    layer = trainer.model.model.layers.get_submodule("1")
    handle = layer.mlp.down_proj.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(
        RuntimeError, match=r"1 gradient\(s\) are not finite: \['model.layers.1.mlp.down_proj.weight'\]"
    ):
        trainer.train(samples)
    handle.remove()
    assert trainer.num_updates == 0
    assert trainer.train(samples) == twin.train(samples)
    assert all(torch.equal(t, tensors_of(twin)[n]) for n, t in tensors_of(trainer).items())


def test_non_finite_loss_is_refused(tiny_ouro: Path) -> None:
    """A loss that is not a number stops the update before gradients are reduced."""
    trainer = make_trainer(tiny_ouro)
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = math.inf
    with pytest.raises(RuntimeError, match="the loss is nan"):
        trainer.train(make_samples(3))
    assert trainer.num_updates == 0


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ([4, 4, 0, 1], "sample 0: trace: loops at position 2: got 0, expected 1 .. 4"),
        ([4, 5, 4, 1], "sample 0: trace: loops at position 1: got 5"),
        ([4, 3, 4, 1], "sample 0: trace: loops at prompt position 1: got 3, expected 4: a prompt always runs"),
    ],
)
def test_bad_traces_are_refused(tiny_ouro: Path, trace: list[int], words: str) -> None:
    """A trace that this model cannot have made is named with sample and position."""
    sample = replace(
        make_samples(1)[0], prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5], rollout_logprobs=[-1.0, -1.0]
    )
    with pytest.raises(ValueError, match=words):
        make_trainer(tiny_ouro).train([replace(sample, trace=torch.tensor(trace))])


def test_bf16_trains_with_fp32_masters(tiny_ouro: Path) -> None:
    """bf16 keeps its names, learns in fp32 masters, and scores no worse than the weights' own rounding.

    A step of 1e-6 vanishes in bf16 weights near 1 (spacing 8e-3) but must add up in the masters.
    """
    samples = make_samples(7)
    full = torch.tensor([x for row in make_trainer(tiny_ouro).score(samples) for x in row])
    trainer = make_trainer(tiny_ouro, dtype=torch.bfloat16, learning_rate=1e-6)
    half = torch.tensor([x for row in trainer.score(samples) for x in row])
    print(
        f"bf16 scores: max {float((half - full).abs().max()):.1e} mean {float((half - full).abs().mean()):.1e} off fp32"
    )
    assert (half - full).abs().max() < 0.1 and (half - full).abs().mean() < 0.02  # bf16 keeps 3 digits of logits near 1
    out = tensors_of(trainer)
    assert list(out) == list(trainer.model.physical) and {t.dtype for t in out.values()} == {torch.bfloat16}
    for _ in range(3):
        assert math.isfinite(trainer.train(samples)["grad_norm"])
    (masters,) = {p.dtype for group in trainer.optimizer.param_groups for p in group["params"]}
    assert masters == torch.float32
    norm = trainer.model.model.norm.weight
    moved = [p for g in trainer.optimizer.param_groups for p in g["params"] if p.numel() == norm.numel()]
    assert any(bool(((p - p.bfloat16().float()).abs() > 0).any()) for p in moved)


def test_temperature_is_not_rounded(tiny_ouro: Path) -> None:
    """In bf16 the temperature stays fp32: 0.7 and its bf16 rounding 0.69921875 score differently, by its own amount."""
    trainer = make_trainer(tiny_ouro, dtype=torch.bfloat16)
    sample = replace(make_samples(1)[0], temperature=0.7)
    rounded = replace(sample, temperature=0.69921875)
    a, b = (torch.tensor(trainer.score([s])[0]) for s in (sample, rounded))
    print(f"difference {float((a - b).abs().max()):.1e}")
    assert (a - b).abs().max() > 0


def test_trainer_options_are_checked() -> None:
    """Settings out of range are refused by name before anything is built."""
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.runtime import RuntimeSettings

    with pytest.raises(ValueError, match="learning_rate: got 0.*beta2: got 1"):
        OptimizerSettings(learning_rate=0, beta2=1)
    with pytest.raises(ValueError, match="lr_decay_updates: got 2"):
        OptimizerSettings(learning_rate=1, lr_warmup_updates=3, lr_decay_updates=2)
    with pytest.raises(ValueError, match="seed: got -1.*deadline_seconds: got 0"):
        RuntimeSettings(seed=-1, deadline_seconds=0)


def test_load_refuses_another_model(tiny_ouro: Path, tmp_path: Path) -> None:
    """A directory with other shapes, or with NaN in a tensor, is refused by name."""
    from safetensors.torch import save_file

    from adapters.hf_convert.directory import HFDirectory
    from tests.tiny import write_ouro

    trainer = make_trainer(tiny_ouro)
    with pytest.raises(ValueError, match="mlp.gate_proj"):
        trainer.load_hf(HFDirectory(write_ouro(tmp_path / "wide", intermediate_size=64)))
    path = write_ouro(tmp_path / "broken")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.input_layernorm.weight"][5] = math.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not finite: \['model.layers.2.input_layernorm.weight'\]"):
        trainer.load_hf(HFDirectory(path))


def test_several_steps_clip_and_start_from_the_same_scores(tiny_ouro: Path) -> None:
    """With one part, `old` is what the first step starts from; later passes leave it and the clip binds."""
    samples = make_samples(6)
    narrow = {"clip_low": 1e-3, "clip_high": 1e-3}
    once = make_trainer(tiny_ouro, grpo=GrpoSettings(**narrow)).train(samples)
    thrice = make_trainer(tiny_ouro, grpo=GrpoSettings(**narrow, epochs=3)).train(samples)
    assert once["ratio_mean"] == 1.0 and once["clip_fraction"] == 0.0 and once["policy_kl"] == 0.0
    assert thrice["clip_fraction"] > 0 and thrice["policy_kl"] > 0 and thrice["num_steps"] == 3
    assert thrice["logprob_diff_mean"] == pytest.approx(once["logprob_diff_mean"], rel=1e-6), "of the old scores"
    assert thrice["num_tokens"] == 3 * once["num_tokens"] and thrice["learning_rate"] == once["learning_rate"]


def test_reference_is_scored_and_leaves_no_mark(tiny_ouro: Path, tmp_path: Path) -> None:
    """A trained trainer scores the reference's directory as a trainer of it does, and goes on with the same bits."""
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.reference import ReferencePolicy
    from tests.tiny import write_ouro

    other = write_ouro(tmp_path / "other", seed=4)
    samples = make_samples(5)
    trainer, twin = make_trainer(tiny_ouro), make_trainer(tiny_ouro)
    for each in (trainer, twin):
        each.train(samples)
    scores = ReferencePolicy(trainer, HFDirectory(other)).score(samples)
    assert scores == make_trainer(other).score(samples) != trainer.score(samples)
    assert trainer.train(samples) == twin.train(samples)
    assert all(torch.equal(t, tensors_of(twin)[n]) for n, t in tensors_of(trainer).items())


def test_a_count_that_does_not_fit_is_refused(tiny_ouro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch that is lost would silently change the normaliser."""
    from adapters.megatron import trainer as module

    real = module.policy_loss
    monkeypatch.setattr(module, "policy_loss", lambda *a: replace(real(*a), count=real(*a).count + 1))
    trainer, before = make_trainer(tiny_ouro), tensors_of(make_trainer(tiny_ouro))
    with pytest.raises(RuntimeError, match="but the samples of this step count"):
        trainer.train(make_samples(3))
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(trainer).items())


def test_nothing_to_train_on_is_no_step(tiny_ouro: Path) -> None:
    """When every sample is masked the weights stay, and the metrics say so."""
    trainer, before = make_trainer(tiny_ouro), tensors_of(make_trainer(tiny_ouro))
    samples = [replace(s, loss_mask=[False] * s.num_scored) for s in make_samples(3)]
    metrics = trainer.train(samples)
    assert metrics["num_steps"] == 0 and metrics["num_tokens"] == 0 and metrics["loss"] is None
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(trainer).items())


def test_whole_tensors_are_read_where_they_lie(tiny_ouro: Path) -> None:
    """On one rank a publication copies each tensor once, into its bucket: before that none is copied."""
    trainer = make_trainer(tiny_ouro)
    own = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    assert all(tensor.untyped_storage().data_ptr() in own for _, tensor in trainer.physical_tensors())
