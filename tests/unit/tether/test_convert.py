"""`tether convert`: export, verify and their errors. The checkpoint here is plain torch_dist, as Megatron writes it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

from adapters.hf_convert.directory import HFDirectory
from adapters.megatron import checkpoint_files as files
from tether.cli import main as tether
from tether.convert import main as convert_main
from tether.stored import find_checkpoint


def convert(arguments: list[str]) -> int:
    """The command, `verify` only reading: what it runs is tested in test_verify_run.py."""
    return convert_main([*arguments, "--files-only"] if arguments[0] == "verify" else arguments)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # on purpose
WEIGHTS = "model.safetensors"


@pytest.fixture
def run_directory(tiny_ouro: Path, tmp_path: Path) -> Path:
    """A run's OUT with one checkpoint of the tiny model, optimizer state beside the parameters."""
    run = tmp_path / "run"
    tensors = load_file(tiny_ouro / WEIGHTS)
    moments = {f"optimizer.state.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    staging = files.staging_name(run / "checkpoints", 2)
    files.prepare(staging)
    checkpoint.save({**tensors, **moments, "num_updates": 2}, checkpoint_id=staging, no_dist=True)
    facts = files.facts(staging, files.names_in(staging))
    files.commit(staging, files.final_name(run / "checkpoints", 2), {"extra": {}}, facts)
    (run / "run.json").write_text(json.dumps({"model": str(tiny_ouro)}))
    return run


@pytest.fixture
def exported(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert convert(["export", str(run_directory), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    return tmp_path / "hf"


def edit_weights(directory: Path, edit: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors = {name: tensor.clone() for name, tensor in {**tensors, **edit}.items() if tensor is not None}
    save_file(tensors, directory / WEIGHTS)


def test_round_trip_is_bitwise(tiny_ouro: Path, exported: Path, run_directory: Path) -> None:
    """Export of a run gives the bits and side files of the model it started from, and `verify` agrees."""
    wanted, got = HFDirectory(tiny_ouro), HFDirectory(exported)
    assert got.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(got.read(name), wanted.read(name)) for name in wanted.tensors)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (tiny_ouro / name).read_bytes()
    for other in (run_directory, run_directory / "checkpoints" / "iter_0000002", tiny_ouro):
        assert convert(["verify", str(exported), "--against", str(other)]) == 0


def test_swapped_tensors_fail(exported: Path, run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tensors of equal shape exchanged: only digests can see it, by the export's record and by the checkpoint."""
    one, other = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    tensors = load_file(exported / WEIGHTS)
    edit_weights(exported, {one: tensors[other], other: tensors[one]})
    assert convert(["verify", str(exported)]) == 1
    assert convert(["verify", str(exported), "--against", str(run_directory)]) == 1
    printed = capsys.readouterr().out
    assert printed.count(f"2 with another content: {other} (got") == 3, printed  # record twice, checkpoint once
    assert "names        ok" in printed and "shapes       ok" in printed


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"lm_head.weight": None}, "names        FAILED  1 missing: lm_head.weight"),
        ({"lm_head.bias": torch.zeros(256)}, "names        FAILED  1 unexpected: lm_head.bias"),
        ({"model.norm.weight": torch.zeros(64)}, "model.norm.weight (got (64,), expected (128,))"),
        ({"model.norm.weight": torch.full((128,), torch.inf)}, "values       FAILED  1 not finite: model.norm"),
        ({"model.norm.weight": torch.ones(128).half()}, "dtypes       FAILED  got ['float16', 'float32']"),
    ],
)
def test_verify_names_the_fault(
    exported: Path, edit: dict[str, torch.Tensor | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of damage fails its own line of the table, by name."""
    edit_weights(exported, edit)
    assert convert(["verify", str(exported)]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, "11 missing: model.layers.3."),
        ({"num_attention_heads": 3}, "num_attention_heads * head_dim: got 3 * 32"),
        ({"model_type": "gpt2"}, "got model_type 'gpt2'"),
        ({"torch_dtype": "bfloat16"}, "config.json declares 'bfloat16', stored as float32"),
    ],
)
def test_verify_reads_the_config(
    exported: Path, change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that does not describe the tensors is found, whichever side is wrong."""
    config = exported / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    assert convert(["verify", str(exported)]) == 1
    assert message in capsys.readouterr().out


def test_truncated_shard_and_wrong_total_size(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sharded export verifies; a wrong total_size fails its line, a truncated shard is an error naming the file."""
    hf = tmp_path / "hf"
    assert convert(["export", str(run_directory), str(hf), "--max-shard-size", "300KB"]) == 0
    assert convert(["verify", str(hf)]) == 0
    assert "index        ok      total_size" in capsys.readouterr().out
    index = hf / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "metadata": {"total_size": 1}}))
    assert convert(["verify", str(hf)]) == 1
    assert "index        FAILED  total_size is 1" in capsys.readouterr().out
    shard = next(hf.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-8])
    assert convert(["verify", str(hf)]) == 1
    assert f"files  FAILED  {shard}: not a whole safetensors file" in capsys.readouterr().out


def test_dtype(run_directory: Path, tmp_path: Path) -> None:
    """--dtype rounds every tensor and says so in config.json, touching nothing else there."""
    hf = tmp_path / "hf"
    assert convert(["export", str(run_directory), str(hf), "--dtype", "bfloat16"]) == 0
    assert convert(["verify", str(hf)]) == 0
    got, wanted = HFDirectory(hf), HFDirectory(json.loads((run_directory / "run.json").read_text())["model"])
    assert got.config == {**wanted.config, "torch_dtype": "bfloat16"}
    assert all(torch.equal(got.read(name), wanted.read(name).bfloat16()) for name in wanted.tensors)


def test_bad_input(run_directory: Path, tiny_ouro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to read, a lost source, a foreign destination, a checkpoint of another model: exit 2 and the reason."""

    def fails(*arguments: object) -> str:
        assert tether(["convert", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "neither a Hugging Face directory" in fails("export", tmp_path, out)
    assert "not an earlier export" in fails("export", run_directory, tiny_ouro)
    assert "not a Hugging Face directory (no config.json)" in fails("verify", tmp_path / "nowhere")
    assert "fixed:9" in fails("export", run_directory, out, "--depth", "fixed:9") and not out.exists()
    moved = tmp_path / "elsewhere"
    shutil.copytree(run_directory / "checkpoints" / "iter_0000002", moved)
    assert "say where its config.json and tokenizer are with --source" in fails("export", moved, out)
    other = tmp_path / "other"
    shutil.copytree(tiny_ouro, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert "11 unexpected: model.layers.2." in fails("export", run_directory, out, "--source", other)
    assert convert(["export", str(moved), str(out), "--source", str(tiny_ouro)]) == 0


def test_damaged_checkpoint(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint file that is gone is an error that names the checkpoint, and no export appears."""
    broken = find_checkpoint(run_directory)
    next(broken.glob("*.distcp")).unlink()
    assert convert(["export", str(broken), str(tmp_path / "hf")]) == 2
    assert f"{broken}: damaged checkpoint, __0_0.distcp: got no file" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_import_is_what_a_run_starts_from(tiny_ouro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HF -> Megatron's own checkpoint -> HF is bitwise, and the checkpoint knows its model without --source."""
    megatron, hf = tmp_path / "megatron", tmp_path / "hf"
    # A process of its own: Megatron-Core keeps global state.
    command = [sys.executable, "-m", "tether.convert", "import", str(tiny_ouro), str(megatron)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{megatron / 'iter_0000000'}: {tiny_ouro} at update 0\n"
    assert convert(["verify", str(tiny_ouro), "--against", str(megatron)]) == 0
    assert convert(["export", str(megatron), str(hf)]) == 0
    assert convert(["verify", str(hf), "--against", str(tiny_ouro)]) == 0
    assert convert(["import", str(tiny_ouro), str(megatron)]) == 2
    assert "holds checkpoints already" in capsys.readouterr().err
