"""A cut of the matrices: overlapped reductions on two ranks, crossings, and a resume from an asynchronous save.

The whole of them is `python -m tests.layouts.matrix`, part of make test-all. Tensor and expert parallelism have cuts of
their own in `tests/unit/megatron_side/test_ranks.py` and `tests/unit/olmoe/test_layouts.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.layouts import ranks
from tests.layouts.cases import LAYOUTS, WRITE
from tests.layouts.checks import check_crossing, check_layout, check_resume, gradient_difference

MODEL, TWO, OVERLAP, FOUR = "ouro", "dp2", "dp2_overlap", "dp2_tp2_sp_overlap"
CELL = "bfloat16-replicated-async"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron: None) -> Path:
    """This process alone, two ranks with and without overlap, what each loads of the other, and a fresh process."""
    folder = tmp_path_factory.mktemp("layouts")
    WRITE[MODEL](folder / MODEL)
    torch.save(ranks.measure(MODEL, "one", folder), folder / f"measure.{MODEL}.one.pt")
    torch.save(ranks.whole(MODEL, "1", CELL, folder), folder / f"whole.{MODEL}.1.{CELL}.pt")
    two = [f"measure.{MODEL}.{TWO}", f"measure.{MODEL}.{OVERLAP}", f"cross.{MODEL}.{TWO}"]
    ranks.launch(two, folder=folder, world=2)
    ranks.launch([f"cross.{MODEL}.one", f"resumed.{MODEL}.1.{CELL}"], folder=folder, world=1)
    return folder


@pytest.mark.parametrize("name", [TWO, OVERLAP])
def test_two_processes_do_what_one_does(folder: Path, name: str) -> None:
    """Scores, losses and gradients are those of one process, also when reductions and gathers overlap."""
    print(check_layout(folder, MODEL, name))


@pytest.mark.slow
def test_four_processes_do_what_one_does(folder: Path) -> None:
    """Data, tensor and sequence parallelism with overlapped reductions."""
    ranks.launch([f"measure.{MODEL}.{FOUR}"], folder=folder, world=LAYOUTS[MODEL][FOUR].world)
    print(check_layout(folder, MODEL, FOUR))


@pytest.mark.parametrize(("source", "target"), [("one", TWO), (TWO, "one"), (TWO, TWO)])
def test_checkpoints_cross(folder: Path, source: str, target: str) -> None:
    """Saved at one layout, loaded at another, saved again: every parameter, master and moment with the same bits."""
    print(check_crossing(folder, MODEL, source, target))


def test_three_and_three_are_six(folder: Path) -> None:
    """bf16, an optimizer that is not divided, and a checkpoint that is written while training goes on."""
    print(check_resume(folder, MODEL, "1", CELL))


def test_other_gradients_would_be_seen(folder: Path) -> None:
    """Mutation: gradients of later updates are nowhere near the bound."""
    other = folder / "runs" / f"{MODEL}.1.{CELL}" / "iter_0000003"
    (folder / f"{MODEL}.other").mkdir()
    (folder / f"{MODEL}.other" / "iter_0000001").symlink_to(other)
    assert gradient_difference(folder, MODEL, "other") > 0.1
