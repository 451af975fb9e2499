"""A cut of the matrices: four processes at once, overlapped reductions, and an asynchronous save between two runs.

The whole of them is `python -m tests.layouts.matrix`, part of make test-all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.cases import LAYOUTS, WRITE
from tests.layouts.checks import check_crossing, check_layout, check_resume, gradient_difference
from tests.layouts.ranks import launch

MODEL, FOUR, WORLD, CELL = "ouro", "dp2_tp2_sp_overlap", "2", "bfloat16-replicated-async"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, four in two by two, and what each loads of the other; six updates on two ranks, and three again."""
    folder = tmp_path_factory.mktemp("layouts")
    WRITE[MODEL](folder / MODEL)
    launch([f"measure.{MODEL}.one"], folder=folder, world=1)
    launch([f"measure.{MODEL}.{FOUR}", f"cross.{MODEL}.{FOUR}"], folder=folder, world=LAYOUTS[MODEL][FOUR].world)
    launch([f"cross.{MODEL}.one"], folder=folder, world=1)
    launch([f"whole.{MODEL}.{WORLD}.{CELL}"], folder=folder, world=2)
    launch([f"resumed.{MODEL}.{WORLD}.{CELL}"], folder=folder, world=2)
    return folder


def test_four_processes_do_what_one_does(folder: Path) -> None:
    """Data, tensor and sequence parallelism with overlapped reductions: scores, losses and gradients of one process."""
    print(check_layout(folder, MODEL, FOUR))


@pytest.mark.parametrize(("source", "target"), [("one", FOUR), (FOUR, "one"), (FOUR, FOUR)])
def test_checkpoints_cross(folder: Path, source: str, target: str) -> None:
    """Saved at one layout, loaded at another, saved again: every parameter, master and moment with the same bits."""
    print(check_crossing(folder, MODEL, source, target))


def test_three_and_three_are_six(folder: Path) -> None:
    """bf16, an optimizer that is not divided, and a checkpoint that is written while training goes on."""
    print(check_resume(folder, MODEL, WORLD, CELL))


def test_other_gradients_would_be_seen(folder: Path) -> None:
    """Mutation: gradients of other samples are nowhere near the bound."""
    from adapters.megatron.checkpoint_files import complete_checkpoints

    other = complete_checkpoints(folder / "runs" / f"{MODEL}.{WORLD}.{CELL}")[0]
    (folder / f"{MODEL}.other").mkdir()
    (folder / f"{MODEL}.other" / "iter_0000001").symlink_to(other)
    assert gradient_difference(folder, MODEL, "other") > 0.1
