"""Learning rates over updates, groups of parameters, frozen parameters; against values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.megatron.parameter_groups import ParameterGroup, parse_groups, schedule_problems
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of

pytestmark = pytest.mark.usefixtures("megatron")
PEAK, FLOOR, WARMUP, DECAY = 8e-4, 1e-4, 2, 8


def by_hand(schedule: str, update: int) -> float:
    """The rate of an update, counted from 0: a ramp that starts at half of the peak, then the decay, then the floor."""
    if update <= WARMUP:
        return PEAK / 2 + PEAK / 2 * update / WARMUP
    share = min(1.0, (update - WARMUP) / (DECAY - WARMUP))
    left = {
        "constant": 1.0,
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "wsd": 1.0 if update <= DECAY - 3 else max(0.0, (DECAY - update) / 3),
    }[schedule]
    return FLOOR + left * (PEAK - FLOOR)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_rates_follow_the_formula_and_groups_are_a_factor_of_it(tiny_ouro: Path, schedule: str) -> None:
    """Warm-up, decay and floor; a group with factor 0.1 is a tenth of it throughout, its warm-up included."""
    trainer = make_trainer(
        tiny_ouro, learning_rate=PEAK, min_learning_rate=FLOOR, lr_warmup_updates=WARMUP, lr_decay_updates=DECAY,
        lr_schedule=schedule, lr_wsd_updates=3 if schedule == "wsd" else 0, weight_decay=0.1,
        groups=(ParameterGroup(pattern="*.mlp.*", lr=0.1, weight_decay=0.5),),
    )  # fmt: skip
    for update in range(11):
        rates = {round(group["lr"], 12) for group in trainer.optimizer.param_groups}
        want = by_hand(schedule, update)
        assert sorted(rates) == pytest.approx([want / 10, want], rel=1e-6), update
        trainer.scheduler.step(1)


def test_groups_train_as_they_say(tiny_ouro: Path) -> None:
    """Adam's first step is the learning rate, and decay takes lr * wd off a weight: seen in the weights themselves."""
    groups = (
        ParameterGroup(pattern="lm_head.weight", lr=0.0),
        ParameterGroup(pattern="*.mlp.down_proj.weight", lr=0.5, weight_decay=2.0),
        ParameterGroup(pattern="*.mlp.*", lr=3.0),
    )
    trainer = make_trainer(tiny_ouro, learning_rate=1e-3, weight_decay=0.1, groups=groups, max_grad_norm=0.0)
    before = tensors_of(trainer)
    trainer.train(make_samples(5))
    after = tensors_of(trainer)

    def step(name: str, lr: float, decay: float) -> float:
        """Largest distance from -lr * sign - lr * decay * w, over all values but the few whose gradient is near 0."""
        moved = (after[name] - before[name] + lr * decay * before[name]).abs()
        return float((moved - lr).abs().quantile(0.9)) / lr

    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    layer = "model.layers.1"
    for name, lr, decay in (
        (f"{layer}.mlp.down_proj.weight", 5e-4, 0.2),
        (f"{layer}.mlp.up_proj.weight", 3e-3, 0.1),
        (f"{layer}.self_attn.q_proj.weight", 1e-3, 0.1),
        (f"{layer}.input_layernorm.weight", 1e-3, 0.0),
    ):
        print(name, step(name, lr, decay))
        assert step(name, lr, decay) < 1e-2


def test_frozen_parameters_stay_bitwise(tiny_ouro: Path, tmp_path: Path) -> None:
    """They have no optimizer state, and the gradient norm is that of the others; a checkpoint resumes them."""
    from adapters.megatron import checkpoint

    options: dict[str, Any] = {"frozen": ("model.embed_tokens.*", "*.layers.0.*"), "max_grad_norm": 0.0}
    trainer, free = make_trainer(tiny_ouro, **options), make_trainer(tiny_ouro, max_grad_norm=0.0)
    before = tensors_of(trainer)
    metrics, whole = trainer.train(make_samples(5)), free.train(make_samples(5))
    after = tensors_of(trainer)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {n for n in before if n.startswith(("model.embed_tokens", "model.layers.0.", "model.early_exit"))}
    left = [p.main_grad for n, p in free.model.named_parameters() if p.requires_grad and n not in same]
    assert metrics["grad_norm"] == pytest.approx(
        math.sqrt(sum(float(g.double().square().sum()) for g in left)), rel=1e-6
    )
    assert metrics["grad_norm"] < whole["grad_norm"] and metrics["loss"] == whole["loss"]
    checkpoint.save(tmp_path / "frozen", trainer, {})
    again = make_trainer(tiny_ouro, load=False, **options)
    checkpoint.load(tmp_path / "frozen", again)
    assert trainer.train(make_samples(5, seed=1)) == again.train(make_samples(5, seed=1))


def test_patterns_that_match_nothing_are_refused(tiny_ouro: Path) -> None:
    """A misspelt name would train, or not train, something silently."""
    with pytest.raises(ValueError, match=r"freeze: no parameter is called model.embed.\*; names are like"):
        make_trainer(tiny_ouro, frozen=("model.embed.*",))
    with pytest.raises(ValueError, match=r"param_groups: no parameter is called \*.mlb.\*"):
        make_trainer(tiny_ouro, groups=(ParameterGroup(pattern="*.mlb.*", lr=0.1),))
    with pytest.raises(ValueError, match=r"freeze: \* leave no parameter to train"):
        make_trainer(tiny_ouro, frozen=("*",))


def test_settings_are_read_and_checked() -> None:
    """PATTERN:lr=FACTOR:wd=FACTOR, and schedules whose parts fit into each other."""
    assert parse_groups("*.gate.*:lr=0.1,lm_head.weight:wd=0:lr=2") == (
        ParameterGroup(pattern="*.gate.*", lr=0.1),
        ParameterGroup(pattern="lm_head.weight", lr=2.0, weight_decay=0.0),
    )
    for text in ("*.gate.*", "a:lr", "a:rate=1", "a:lr=-1", ":lr=1"):
        with pytest.raises(ValueError, match="param_groups: got"):
            parse_groups(text)
    assert schedule_problems(schedule="wsd", warmup=2, decay=10, wsd=8) == []
    for changed in ({"wsd": 9}, {"wsd": 0}, {"schedule": "cosine"}, {"schedule": "steps"}, {"decay": 2}):
        assert schedule_problems(**{"schedule": "wsd", "warmup": 2, "decay": 10, "wsd": 8, **changed})  # type: ignore[arg-type]
