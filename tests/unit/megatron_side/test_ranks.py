"""Several processes: data and tensor parallelism against one, checkpoints across layouts, errors on one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.megatron_side.ranks import LOSSES, alone, findings, launch


@pytest.fixture(scope="module")
def folder(tiny_ouro: Path, tmp_path_factory: pytest.TempPathFactory, megatron: None) -> Path:
    """Everything is run once: this process alone, two ranks in two layouts, and a fresh process that goes on."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(tiny_ouro, folder / "model")
    torch.save(alone(folder), folder / "alone.pt")
    launch(["data_parallel", "tensor_parallel"], folder=folder, world=2)
    launch(["resumed", "from_halves"], folder=folder, world=1)
    return folder


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory: parameters, masters and moments."""
    from adapters.megatron.checkpoint_files import latest
    from adapters.megatron.checkpoint_reader import CheckpointReader

    newest = latest(path)
    assert newest is not None
    reader = CheckpointReader(newest)
    return dict(reader.read(sorted(reader.shapes)))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flat(scores: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in scores for x in row])


@pytest.mark.parametrize("layout", ["data_parallel", "tensor_parallel"])
@pytest.mark.parametrize("count", ["seven", "one"])
def test_two_ranks_do_what_one_does(folder: Path, layout: str, count: str) -> None:
    """Scores, loss, gradient norm and counts of an update, with 7 samples and with 1 (a rank goes empty-handed)."""
    one, two = findings(folder, "alone")[count], findings(folder, layout)[count]
    scores = float((flat(two["scores"]) - flat(one["scores"])).abs().max())
    a, b = one["metrics"], two["metrics"]
    print(f"{layout} {count}: scores {scores:.1e}, loss {abs(a['loss'] - b['loss']):.1e}, "
          f"grad_norm {abs(b['grad_norm'] / a['grad_norm'] - 1):.1e}")  # fmt: skip
    assert scores <= 2e-6  # sums over two halves round differently
    assert abs(a["loss"] - b["loss"]) <= 1e-6 and abs(b["grad_norm"] / a["grad_norm"] - 1) <= 1e-6
    assert a.keys() == b.keys() and all(a[k] == b[k] for k in a if k.startswith("num_"))


@pytest.mark.parametrize("layout", ["data_parallel", "tensor_parallel"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_every_normaliser_is_global(folder: Path, layout: str, name: str) -> None:
    """Losses by sequence, with an entropy bonus and a reference, and several steps of which the later ones clip."""
    one, two = (findings(folder, stage)["losses"][name] for stage in ("alone", layout))
    print(f"{layout} {name}: loss {one['loss']:.8f}, {abs(one['loss'] - two['loss']):.1e} apart, "
          f"norm {abs(one['grad_norm'] / two['grad_norm'] - 1):.1e}, clipped {one['clip_fraction']:.3f}")  # fmt: skip
    assert one.keys() == two.keys() and one["num_steps"] == (4 if "two" in name else 1)
    assert abs(one["loss"] - two["loss"]) <= 1e-6 and one["num_tokens"] == two["num_tokens"]
    # Halves of a projection round activations otherwise (a norm of 27 moved by 1.1e-6 of it); after a step, noise that
    # differs in sign shows too (`ranks.losses`).
    bound = 1e-5 if one["num_steps"] > 1 else 2e-6 if layout == "tensor_parallel" else 1e-6
    assert abs(one["grad_norm"] / two["grad_norm"] - 1) <= bound
    if "two" in name:
        assert 0 < one["clip_fraction"] < 1
    else:
        assert abs(one["entropy"] - two["entropy"]) <= 1e-5


@pytest.mark.parametrize("layout", ["data_parallel", "tensor_parallel"])
def test_two_ranks_step_as_one(folder: Path, layout: str) -> None:
    """The updated weights agree. Adam's first step is lr * sign(g): noise may differ in sign."""
    one, two = findings(folder, "alone")["seven"]["weights"], findings(folder, layout)["seven"]["weights"]
    apart = torch.cat([(two[name] - tensor).abs().flatten() for name, tensor in one.items()])
    print(f"{layout}: max {float(apart.max()):.1e} mean {float(apart.mean()):.1e} of a step of 1e-3, "
          f"{int((apart > 1e-4).sum())} of {len(apart)} values differ by more than a tenth of it")  # fmt: skip
    assert apart.mean() < 1e-7 and (apart > 1e-4).sum() < 1e-4 * len(apart)


def test_sequence_parallelism_changes_nothing(folder: Path) -> None:
    """With sequence parallelism and recomputation, odd token counts included, the update is the same."""
    plain, cut = (findings(folder, "tensor_parallel")[name] for name in ("seven", "sequence"))
    scores = float((flat(cut["scores"]) - flat(plain["scores"])).abs().max())
    norm = abs(cut["metrics"]["grad_norm"] / plain["metrics"]["grad_norm"] - 1)
    print(f"scores {scores:.1e}, grad_norm {norm:.1e}")
    assert scores <= 2e-6 and norm <= 1e-6


def test_bf16_under_tensor_parallelism(folder: Path) -> None:
    """bf16 with fp32 masters trains in two halves: a norm near that of fp32."""
    found = findings(folder, "tensor_parallel")
    ratio = found["bf16"]["grad_norm"] / found["seven"]["metrics"]["grad_norm"]
    print(f"grad_norm bf16 / fp32 {ratio:.4f}")
    assert abs(ratio - 1) < 0.05  # bf16 keeps 3 digits


def test_resume_in_a_fresh_process_is_bitwise(folder: Path) -> None:
    """Weights, masters, moments, schedule, generators, the next update's metrics and its weights: all the same bits."""
    before, after = findings(folder, "alone"), findings(folder, "resumed")
    assert after["extra"] == {"position": 10, "version": [1, 2]} and after["num_updates"] == 2
    assert equal(after["saved"], before["saved"]) and torch.equal(after["drawn"], before["drawn"])
    assert equal(stored(folder / "again"), stored(folder / "alone"))
    assert after["metrics"] == before["metrics"] and equal(after["after"], before["after"])
    assert not equal(before["after"], before["saved"])


def test_checkpoint_keys_are_hugging_face_names(folder: Path) -> None:
    """A parameter is stored under its HF name; masters and moments, 3 a trained tensor, beside it; nothing else."""
    tensors, weights = stored(folder / "alone"), findings(folder, "alone")["saved"]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())
    trained = [name for name in weights if "early_exit_gate" not in name]
    states = {f"optimizer.state.{kind}.{name}" for name in trained for kind in ("param", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == weights.keys() | states
    assert all(torch.equal(tensors[f"optimizer.state.param.{name}"], weights[name]) for name in trained), "fp32"


@pytest.mark.parametrize(("layout", "name"), [("data_parallel", "two_to_one"), ("tensor_parallel", "halves")])
def test_checkpoints_cross_layouts(folder: Path, layout: str, name: str) -> None:
    """1 -> 2 -> 1 ranks: every weight, master and moment arrives with the same bits, and training goes on alike."""
    before, there, back = (findings(folder, stage) for stage in ("alone", layout, "from_halves"))
    original = stored(folder / "alone")
    assert equal(there["loaded"], before["saved"]) and equal(back[name]["weights"], before["saved"])
    assert equal(stored(folder / name), original) and equal(stored(folder / f"{name}_again"), original)
    assert back[name]["metrics"] == before["metrics"]


def test_a_bucket_is_gathered_in_its_place(folder: Path) -> None:
    """State in many buckets, each cut in two between the ranks, is stored as one process stores what it never cut."""
    assert findings(folder, "data_parallel")["buckets"] > 3
    assert equal(stored(folder / "in_buckets"), stored(folder / "alone"))


def test_an_error_on_one_rank_is_an_error_on_all(folder: Path) -> None:
    """Whatever fails on rank 1 alone raises on both at once, and training can go on from the unchanged state."""
    found: dict[str, Any] = findings(folder, "data_parallel")
    for case in ("bad sample", "other samples", "broken forward", "broken score", "broken gradient"):
        print(f"{case}: {found[case]}")
        assert "no error" not in found[case]
    assert found["bad sample"].startswith("RuntimeError: rank 1 failed and all ranks stop: ValueError: ")
    assert "ranks [1] have another version of the samples" in found["other samples"]
    assert found["broken forward"].endswith("ValueError: broken on purpose | ValueError: broken on purpose")
    assert "model.norm.weight" in found["broken gradient"]
    expected = findings(folder, "alone")["metrics"]
    assert found["after errors"]["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["after errors"]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
