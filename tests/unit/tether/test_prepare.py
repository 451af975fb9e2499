"""What is refused before anything heavy starts, through the command line, and what a dry run says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tether.run_directory import RunDirectory
from tether.train import main


@pytest.fixture
def model(tiny_ouro: Path, tmp_path: Path) -> Path:
    """A checkpoint of this test's own."""
    return Path(shutil.copytree(tiny_ouro, tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [3, 4, 5], "label": "1"}) + "\n")
    return path


def run(model: Path, data: Path, out: Path, *more: str, updates: int = 4) -> int:
    return main(["--model", str(model), "--data", str(data), "--out", str(out), "--updates", str(updates), *more])


def test_dry_run_checks_everything_and_starts_nothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the resolved settings and a memory estimate, writes nothing, and loads neither trainer nor engine."""
    heavy = set(sys.modules) & {"megatron.core", "vllm"}
    assert run(model, data, tmp_path / "out", "--dry-run", "--set", "depth=cycle:3,4,2") == 0
    text = capsys.readouterr().err
    for part in ("ouro, 38 tensors", "1 prompts, longest sequence 259 tokens", "depth=cycle:3,4,2", "dtype=float32"):
        assert part in text, part
    assert "trainer:" in text and "engine:" in text and "nothing started" in text
    assert not (tmp_path / "out").exists()
    assert set(sys.modules) & {"megatron.core", "vllm"} == heavy


def test_model_must_be_a_whole_checkpoint_of_a_known_type(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing directory, an unknown model type, and tensors that contradict config.json."""
    assert run(tmp_path / "nowhere", data, tmp_path / "out") == 2
    assert "config.json is missing" in capsys.readouterr().err

    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert run(model, data, tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "lm_head.weight" in message and "model.norm.weight" in message

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert run(model, data, tmp_path / "out") == 2
    assert "got model_type 'llama'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "depth=fixed:5"], "expected 1 <= MIN <= MAX <= 4 loops"),
        (["--set", "depth=cycle:4,9"], "fixed:9"),
        (["--set", "reward=tether.rewards:nothing"], "has no function 'nothing'"),
        (["--set", "max_new_tokens=510"], "data.jsonl:1: the prompt has 3 tokens, expected at most 2"),
        (["--set", "eval_data=nowhere.jsonl"], "nowhere.jsonl: cannot read the data file"),
        (["--resume"], "no run to resume"),
        (
            ["--set", "train_devices=2"],
            "train_devices: got 2 in 1 process(es), expected as many; `python -m tether.launch`",
        ),
        (
            ["--set", "train_devices=2", "--set", "pipeline_parallel=2"],
            "pipeline parallelism: the trainer's schedule has",
        ),
        (
            ["--set", "train_devices=2", "--set", "context_parallel=2"],
            "context parallelism: attention sees whole packed",
        ),
        (["--set", "train_devices=2", "--set", "expert_parallel=2"], "expert parallelism: an Ouro has no experts"),
        (["--set", "train_devices=3", "--set", "tensor_parallel=3"], "tensor_parallel 3 does not divide num_heads 4, "),
        (["--set", "sequence_parallel=true"], "sequence_parallel: got true with tensor_parallel 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list, message: str
) -> None:
    """Settings against the model, prompts against the context, and a resume of nothing."""
    assert run(tiny_ouro, data, tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_errors_name_file_and_line(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They come from the command line, not only from the function."""
    data.write_text(data.read_text() + '{"prompt_token_ids": [1]}\n')
    assert run(tiny_ouro, data, tmp_path / "out") == 2
    assert f"{data}:2: label is missing" in capsys.readouterr().err


def write_run(path: Path, contract: dict) -> RunDirectory:
    """A run with the checkpoint of update 6."""
    out = RunDirectory(path)
    out.create({"contract": contract})
    (out.checkpoints / "iter_0000006").mkdir()
    (out.checkpoints / "iter_0000006" / "tether.json").write_text('{"files": {}}')
    return out


def test_out_of_another_run_is_refused(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory belongs to one run, and a resume to its contract."""
    write_run(tmp_path / "out", {"lr": 1e-6, "seed": 0})
    assert run(tiny_ouro, data, tmp_path / "out") == 2
    assert "holds another run; add --resume" in capsys.readouterr().err
    assert run(tiny_ouro, data, tmp_path / "out", "--resume", "--set", "lr=0.5", updates=6) == 2
    message = capsys.readouterr().err
    assert "the run contract differs" in message and "lr: the run has 1e-06, now 0.5" in message
    assert "seed:" not in message


def test_fewer_updates_than_are_done_are_refused(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume cannot go back."""
    write_run(tmp_path / "out", {})
    assert run(tiny_ouro, data, tmp_path / "out", "--resume", updates=5) == 2
    assert "--updates: got 5, expected at least 6" in capsys.readouterr().err


def test_a_resume_never_starts_from_the_model(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint --resume is refused; the run, which has done nothing, may be started again without it."""
    out = RunDirectory(tmp_path / "out")
    out.create({"contract": {}})
    assert run(tiny_ouro, data, out.path, "--resume") == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err
    assert run(tiny_ouro, data, out.path, "--dry-run") == 0
    out.append_metrics({"update": 1})
    assert run(tiny_ouro, data, out.path, "--dry-run") == 2
    assert "holds another run" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_named_and_another_offered(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not replaced unasked; --resume-from takes the one before."""
    assert run(tiny_ouro, data, tmp_path / "out", "--dry-run") == 0
    out = write_run(tmp_path / "out", prepare_contract(tiny_ouro, data))
    (out.checkpoints / "iter_0000008").mkdir()
    (out.checkpoints / "latest").write_text("iter_0000008\n")
    capsys.readouterr()
    assert run(tiny_ouro, data, out.path, "--resume", updates=9) == 2
    assert "iter_0000008: damaged checkpoint" in (text := capsys.readouterr().err) and "--resume-from 6" in text
    assert run(tiny_ouro, data, out.path, "--resume-from", "8", updates=9) == 2
    assert run(tiny_ouro, data, out.path, "--resume-from", "6", "--dry-run", updates=9) == 0


def test_a_named_change_is_allowed(
    tiny_ouro: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the fields that are named may differ, and a name that is none is refused."""
    out = write_run(tmp_path / "out", prepare_contract(tiny_ouro, data))
    change = ("--set", "lr=0.5", "--set", "seed=3", "--resume", "--dry-run")
    assert run(tiny_ouro, data, out.path, *change, "--allow-change", "lr", updates=6) == 2
    assert "seed: the run has 0, now 3" in (text := capsys.readouterr().err) and "lr:" not in text
    assert run(tiny_ouro, data, out.path, *change, "--allow-change", "lr", "--allow-change", "seed", updates=6) == 0
    assert run(tiny_ouro, data, out.path, *change, "--allow-change", "learning_rate", updates=6) == 2
    assert "--allow-change learning_rate: expected one of" in capsys.readouterr().err


def prepare_contract(model: Path, data: Path) -> dict:
    from tether.prepare import prepare
    from tether.settings import RunArguments

    return prepare(RunArguments(model=model, data=data, out=data.parent / "free", updates=1)).contract
