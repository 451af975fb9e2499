"""Every step of a publication broken once, and every kind of fault once. The matrix of all is `fault_matrix.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from adapters.contract import PublicationFailed
from adapters.vllm_engine.client.local import LocalEngine
from tests.tiny import write_ouro

from . import faults
from .cells import LOST, PROCESS_FAULTS, ROLLBACK, STEPS, TENSOR_FAULTS, Bench, all_cells, bench, cell_id, check
from .conftest import MODELS, drawn, make_requests, next_version, run, settings_for

CELLS = [
    ("begin", "extra"),
    ("begin", "duplicate"),
    ("stage first", "missing"),
    ("stage first", "corrupt byte"),
    ("stage last", "dtype"),
    ("stage last", "misshapen"),
    ("prepare", "exception"),
    ("prepare", "kill"),
    ("commit", "nan"),
    ("commit", "corrupt byte"),
    ("commit", "lost reply"),
    ("read back", "corrupt byte"),
    ("verify", "stall"),
    ("cache reset", "exception"),
    ("settle", "exception"),
    (ROLLBACK, "exception"),
    (ROLLBACK, "stop"),
]


@pytest.fixture(scope="module", params=["ouro", pytest.param("olmoe", marks=pytest.mark.slow)])
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    with bench({n: MODELS[request.param](folder / n, seed=i) for i, n in enumerate("AB")}, folder) as running:
        yield running


@pytest.mark.parametrize("cell", CELLS, ids=cell_id)
def test_a_fault_leaves_the_old_version_or_the_new_one(stand: Bench, cell: tuple[str, str]) -> None:
    """Outputs equal those of an engine started on either set of weights, exactly; then a good publication succeeds."""
    print(check(stand, *cell))


def test_a_fault_while_ways_to_load_are_tried_out_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first commit, when the served memory holds random tensors: the engine goes back, then on by vLLM."""
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "fault"))
    models = {name: write_ouro(tmp_path / name, seed=seed) for seed, name in enumerate("AB")}
    with LocalEngine(settings_for(models["B"], tmp_path / "fresh.log")) as engine:
        wanted = drawn(run(engine, make_requests("r")))
    weights = load_file(models["B"] / "model.safetensors")
    with LocalEngine(settings_for(models["A"], tmp_path / "log"), module=faults.MODULE) as engine:
        old = drawn(run(engine, make_requests("r")))
        faults.order(("_load_by_vllm", "none"), ("_load_by_vllm", "exception"))
        with pytest.raises(PublicationFailed):
            engine.publish(next_version(engine), weights)
        assert not faults.withdraw()
        assert drawn(run(engine, make_requests("r"))) == old != wanted
        engine.publish(next_version(engine), weights)
        assert drawn(run(engine, make_requests("r"))) == wanted
        assert "weights are loaded directly" not in engine.settings.log_path.read_text()


def test_the_short_list_meets_every_step_and_every_fault() -> None:
    """A step or a fault that is added to the matrix is added here too."""
    steps, faults = ({cell[i] for cell in CELLS} for i in (0, 1))
    assert steps == {*STEPS, ROLLBACK}
    assert faults == {*PROCESS_FAULTS, *TENSOR_FAULTS, "corrupt byte", "lost reply"}
    assert set(CELLS) <= set(all_cells()) and len(all_cells()) >= 60 and LOST
