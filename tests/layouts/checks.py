"""What the findings of the stages must show. Each check returns its figures and raises AssertionError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.layouts.cases import BETA1, equal, stored
from tests.ranks import findings

BOUND = 1e-5
"""Of losses, log-probs and gradients (relative to the largest of a tensor) against one process: fp32 sums in another
order. A layout that forgets a reduction or counts a token twice is off by 1e-1."""
KINDS = ("param", "exp_avg", "exp_avg_sq")


def check_layout(folder: Path, model: str, name: str) -> dict[str, float]:
    """Scores, the losses of two updates, the gradient norm and every gradient of the first equal the one process's."""
    one, other = (findings(folder, f"measure.{model}.{each}") for each in ("one", name))
    scores = max(
        abs(a - b) for x, y in zip(one["scores"], other["scores"], strict=True) for a, b in zip(x, y, strict=True)
    )
    pairs = list(zip(one["metrics"], other["metrics"], strict=True))
    figures = {
        "scores": scores,
        "losses": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "grad_norm": abs(pairs[0][1]["grad_norm"] / pairs[0][0]["grad_norm"] - 1),
        "gradients": gradient_difference(folder, model, name),
    }
    assert max(figures.values()) <= BOUND, f"{model} {name}: {figures}, expected at most {BOUND}"
    return figures


def gradient_difference(folder: Path, model: str, name: str) -> float:
    """Largest difference of a gradient, over the largest value of its tensor. Adam's first moment is (1 - beta1) g."""
    one, other = (stored(folder / f"{model}.{each}" / "iter_0000001", "exp_avg") for each in ("one", name))
    assert one.keys() == other.keys() and len(one) > 20
    worst = 0.0
    for key, moment in one.items():
        scale = float(moment.abs().max())
        if scale == 0:
            assert not other[key].any(), key
            continue
        worst = max(worst, float((other[key] - moment).abs().max()) / scale)
    assert 0 < float(max(tensor.abs().max() for tensor in one.values())) / (1 - BETA1) < 1e3
    return worst


def check_crossing(folder: Path, model: str, source: str, target: str) -> dict[str, Any]:
    """What one layout saved and another loaded and saved again is bitwise the same; the next update follows."""
    before = stored(folder / f"{model}.{source}" / "iter_0000001")
    after = stored(folder / "again" / f"{model}.{source}.{target}" / "iter_0000001")
    assert {f"optimizer.state.{kind}." for kind in KINDS} == {
        name[: name.index(".", len("optimizer.state.")) + 1] for name in before if name.startswith("optimizer.")
    }
    assert equal(before, after), f"{model} {source} -> {target}: " + str(
        [name for name in before if name not in after or not torch.equal(before[name], after[name])][:10]
    )
    went_on = findings(folder, f"cross.{model}.{target}")[source]
    straight = findings(folder, f"measure.{model}.{source}")["metrics"][1]
    loss = abs(went_on["loss"] - straight["loss"])
    assert loss <= BOUND and went_on["learning_rate"] == straight["learning_rate"], (loss, went_on, straight)
    return {"tensors": len(before), "next_loss": loss, "bitwise": True}


def check_resume(folder: Path, model: str, world: str, cell: str) -> dict[str, Any]:
    """Parameters, masters, moments, generators and metrics of 3 + 3 updates are bitwise those of 6."""
    from adapters.megatron.checkpoint_files import read_description

    name = f"{model}.{world}.{cell}"
    ends = [folder / part / name / "iter_0000006" for part in ("runs", "resumed")]
    one, other = (stored(path) for path in ends)
    assert equal(one, other), f"{name}: " + str([key for key in one if not torch.equal(one[key], other[key])][:10])
    drawn = [read_description(path)["extra"]["drawn"] for path in ends]
    assert drawn[0] == drawn[1] != read_description(ends[0].with_name("iter_0000003"))["extra"]["drawn"], drawn
    straight = findings(folder, f"whole.{name}")
    went_on = findings(folder, f"resumed.{name}")["metrics"]
    assert went_on == straight[3:], f"{name}: {went_on} != {straight[3:]}"
    assert not equal(one, stored(ends[0].with_name("iter_0000003"))), "three updates changed nothing"
    return {"tensors": len(one), "bitwise": True, "losses": [line["loss"] for line in straight]}
