"""python -m tether.checkpoint: what it lists, shows and compares, and what it finds damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from adapters.hf_convert.digest import tensor_digest
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of
from tether.checkpoint import main


@pytest.fixture(scope="module")
def run(tiny_ouro: Path, tmp_path_factory: pytest.TempPathFactory, megatron: None) -> Path:
    """OUT of a run with the checkpoints of updates 0 and 1, the second one in the same-layout format too."""
    from adapters.megatron import checkpoint

    out, trainer = tmp_path_factory.mktemp("run"), make_trainer(tiny_ouro)
    extra = {"update": 0, "incarnation": 2, "position": 16, "contract": {"lr": 1e-3, "seed": 5}}
    checkpoint.save(out / "checkpoints", trainer, extra)
    trainer.train(make_samples(5))
    checkpoint.save(out / "checkpoints", trainer, {**extra, "update": 1, "contract": {"lr": 2e-3, "seed": 5}})
    checkpoint.begin(out / "fast", trainer, extra, format="same_layout").complete()
    torch.save(tensors_of(trainer), out / "tensors.pt")
    return out


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def tool(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(each) for each in arguments]) == code
    out, err = capsys.readouterr()
    return out if code < 2 else err


def test_ls(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every checkpoint with its state, version and layout; the damaged ones say why."""
    head, zero, one = tool(capsys, "ls", copied).splitlines()
    assert head.split() == ["checkpoint", "state", "version", "format", "optimizer", "layout", "size", "written"]
    assert zero.startswith(
        "iter_0000000  complete          (2, 0)   reshardable  distributed  tensor=1 expert=1 expert_tensor=1 data=1"
    )
    assert one.startswith("iter_0000001  complete, latest  (2, 1)")
    next((copied / "checkpoints" / "iter_0000001").glob("*.distcp")).unlink()
    assert "damaged, latest: __0_" in tool(capsys, "ls", copied / "checkpoints")
    shutil.rmtree(copied / "checkpoints" / "iter_0000001")
    assert "iter_0000001  damaged, latest: it is not there" in tool(capsys, "ls", copied)
    assert "no checkpoints" in tool(capsys, "ls", copied / "tensors.pt", code=2)


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract, names, shapes, dtypes; digests are those of the tensors themselves."""
    lines = tool(capsys, "show", run, "--digests").splitlines()
    assert lines[0].endswith("iter_0000001") and "  lr    0.002" in lines and "146 tensors:" in lines
    shown = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("  model.") or "lm_head" in line}
    want = torch.load(run / "tensors.pt")
    assert {name: tensor_digest(tensor) for name, tensor in want.items()}.items() <= shown.items()
    assert any(line.split() == ["model.norm.weight", "[128]", "float32", shown["model.norm.weight"]] for line in lines)


def test_diff(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What differs and by how much, the worst first; equal checkpoints say so and exit with 0."""
    zero, one = (run / "checkpoints" / f"iter_000000{i}" for i in (0, 1))
    lines = tool(capsys, "diff", zero, one, code=1).splitlines()
    assert any(line.split() == ["lr", "0.001", "->", "0.002"] for line in lines)
    assert any(line.split() == ["update", "'0'", "->", "'1'"] for line in lines)
    assert lines[-1] == "2 of 146 common tensors are bitwise equal", "the frozen gate"
    assert "  ... 124 more (--all)" in lines
    every = tool(capsys, "diff", zero, one, "--all", code=1).splitlines()
    row = next(line.split() for line in every if line.split()[0] == "model.norm.weight")
    assert float(row[1]) == pytest.approx(1e-3, rel=1e-3) and row[-3:] == ["128", "of", "128"], "Adam's first step"
    assert tool(capsys, "diff", one, run).splitlines()[-1] == "146 of 146 common tensors are bitwise equal"
    assert tool(capsys, "diff", one, run / "fast", code=1).splitlines()[-1].startswith("38 of 38 common tensors")


def test_verify(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole one passes; a flipped bit, a missing file and a value that is not finite are named."""
    for path in (copied, copied / "fast", copied / "checkpoints" / "iter_0000000"):
        assert ": whole; " in tool(capsys, "verify", path)
    path = copied / "checkpoints" / "iter_0000000"
    file = next(path.glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    assert f"{file.name}: its bytes have changed" in tool(capsys, "verify", path, code=1)
    file.unlink()
    assert f"{file.name}: got no file" in tool(capsys, "verify", path, code=1)


def test_verify_reads_values(tiny_ouro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """Bytes as written may still be wrong."""
    from adapters.megatron import checkpoint

    trainer = make_trainer(tiny_ouro)
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = torch.nan
    path = checkpoint.save(tmp_path, trainer, {})
    assert "model.norm.weight: values that are not finite" in tool(capsys, "verify", path, code=1)
