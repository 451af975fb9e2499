"""What an export changes on request, and that `verify` finds each way in which a directory goes wrong, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

from adapters.hf_convert.directory import HFDirectory
from adapters.megatron import checkpoint_files as files
from providers.ouro import remote_code
from tests.tiny import write_ouro
from tether.convert import main as convert
from tether.exporting import export_weights
from tether.stored import open_weights, passing_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # on purpose
WEIGHTS = "model.safetensors"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**read(path), **entries}))


def write_run(run: Path, source: Path, *, depth: str = "full", tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A run's OUT with one checkpoint, as plain torch_dist."""
    staging = files.staging_name(run / "checkpoints", 2)
    files.prepare(staging)
    checkpoint.save(tensors or load_file(source / WEIGHTS), checkpoint_id=staging, no_dist=True)
    files.commit(
        staging, files.final_name(run / "checkpoints", 2), {"extra": {}}, files.facts(staging, files.names_in(staging))
    )
    (run / "run.json").write_text(json.dumps({"model": str(source), "settings": {"depth": depth}}))
    return run


def verify(directory: Path, *more: object) -> int:
    return convert(["verify", str(directory), "--files-only", *map(str, more)])


@pytest.mark.parametrize(
    ("trained", "arguments", "recorded", "said"),
    [
        ("full", [], None, "depth full by default (the run trained at it)"),
        ("fixed:2", [], "fixed:2", "depth fixed:2 by default (the run trained at it)"),
        ("early:0.9:2:4", [], "early:0.9:2:4", "depth early:0.9:2:4 by default (the run trained at it)"),
        ("cycle:3,4,2", [], None, "depth full by default (the run trained at cycle:3,4,2; --depth chooses one)"),
        ("cycle:3,4,2", ["--depth", "fixed:3"], "fixed:3", "depth fixed:3 by default (asked for)"),
    ],
)
def test_depth_travels(
    tiny_ouro: Path, tmp_path: Path, trained: str, arguments: list[str], recorded: str | None, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The policy that a run trained at is in config.json, nothing else changes there, and the log says it."""
    run = write_run(tmp_path / "run", tiny_ouro, depth=trained)
    assert convert(["export", str(run), str(tmp_path / "hf"), *arguments]) == 0
    assert said in capsys.readouterr().out
    config = read(tmp_path / "hf" / "config.json")
    assert config.pop("depth_policy", None) == recorded
    assert config == read(tiny_ouro / "config.json")
    assert verify(tmp_path / "hf", "--against", run) == 0


def test_full_depth_overrides_a_recorded_policy(tmp_path: Path) -> None:
    """A run at full depth that began from a fixed:2 export is exported as full."""
    source = write_ouro(tmp_path / "source", depth_policy="fixed:2")
    run = write_run(tmp_path / "run", source)
    assert convert(["export", str(run), str(tmp_path / "hf")]) == 0
    assert read(tmp_path / "hf" / "config.json")["depth_policy"] == "full"


@pytest.fixture
def with_public_code(tiny_ouro: Path, tmp_path: Path) -> Path:
    """A model that brings code of its own."""
    source = tmp_path / "public"
    shutil.copytree(tiny_ouro, source)
    edit(source / "config.json", auto_map={"AutoConfig": "configuration_ouro.Other"})
    (source / "configuration_ouro.py").write_text("# theirs")
    return source


@pytest.mark.parametrize("choice", ["ours", "keep", "none"])
def test_remote_code(with_public_code: Path, tmp_path: Path, choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ours, to the byte and named in config.json; the source's; or none, with a warning that nobody can load it."""
    out = tmp_path / "hf"
    assert convert(["export", str(with_public_code), str(out), "--remote-code", choice]) == 0
    code = {file.name: file.read_bytes() for file in out.glob("*.py")}
    ours = {name: (remote_code.FOLDER / name).read_bytes() for name in remote_code.FILES}
    assert code == {"ours": ours, "keep": {"configuration_ouro.py": b"# theirs"}, "none": {}}[choice]
    auto_map = {"ours": remote_code.AUTO_MAP, "keep": {"AutoConfig": "configuration_ouro.Other"}, "none": None}[choice]
    assert read(out / "config.json").get("auto_map") == auto_map
    assert ("carries no code for it" in capsys.readouterr().err) == (choice == "none")
    assert verify(out) == 0


def test_no_code_of_ours_for_olmoe(tiny_olmoe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(["export", str(tiny_olmoe), str(tmp_path / "hf"), "--remote-code", "ours"]) == 2
    assert "transformers itself has 'olmoe'" in capsys.readouterr().err


def test_vocabulary_padding_is_left_out(tiny_ouro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows past vocab_size in a checkpoint are cut, said, and do not count in a comparison; a short one is refused."""
    tensors = load_file(tiny_ouro / WEIGHTS)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    padded = {**tensors, **{name: torch.cat([tensors[name], torch.full((8, 128), 9.0)]) for name in names}}
    run = write_run(tmp_path / "run", tiny_ouro, tensors=padded)
    assert convert(["export", str(run), str(tmp_path / "hf")]) == 0
    assert "padding, rows from 256 on, of lm_head.weight, model.embed_tokens.weight" in capsys.readouterr().err
    written = HFDirectory(tmp_path / "hf")
    assert all(torch.equal(written.read(name), tensors[name]) for name in tensors)
    assert verify(tmp_path / "hf", "--against", run) == 0
    short = {**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1]}
    run = write_run(tmp_path / "short", tiny_ouro, tensors=short)
    assert convert(["export", str(run), str(tmp_path / "other")]) == 2
    assert "lm_head.weight (got (255, 128), expected (256, 128))" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("300000", 300_000), ("300KB", 300_000), ("1MiB", 1 << 20), ("2GB", 2 * 10**9)]
)
def test_shard_size(tiny_ouro: Path, tmp_path: Path, text: str, size: int) -> None:
    out = tmp_path / "hf"
    assert convert(["export", str(tiny_ouro), str(out), "--max-shard-size", text]) == 0
    weights = [sum(t.nbytes for t in load_file(file).values()) for file in out.glob("*.safetensors")]
    assert max(weights) <= size and (len(weights) > 1) == (size < sum(weights))


@pytest.mark.parametrize("text", ["0", "5 GB", "GB", "1TB", "-1"])
def test_bad_shard_size(tiny_ouro: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit):
        convert(["export", str(tiny_ouro), str(tmp_path / "hf"), f"--max-shard-size={text}"])


@pytest.fixture
def zeros(tmp_path: Path) -> Path:
    """A release that says 0 for every special token, while its tokenizer has 1, 2 and 3."""
    source = write_ouro(tmp_path / "zeros", bos_token_id=0, eos_token_id=0, pad_token_id=0)
    edit(source / "tokenizer_config.json", bos_token="t1", eos_token="t2", pad_token="t3")
    return source


def test_zero_token_ids(zeros: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export warns with the tokenizer's real ids, `verify` fails, --fix-token-ids writes them in."""
    out = tmp_path / "hf"
    assert convert(["export", str(zeros), str(out)]) == 0
    warned = capsys.readouterr().err
    assert "warning: config.json: eos_token_id is 0, the tokenizer's is 2 ('t2')" in warned
    assert "warning: generation_config.json: pad_token_id is 0, the tokenizer's is 3 ('t3')" in warned
    assert verify(out) == 1
    assert "token ids    FAILED  config.json: bos_token_id is 0, the tokenizer's is 1 ('t1')" in capsys.readouterr().out
    assert convert(["export", str(zeros), str(out), "--fix-token-ids"]) == 0
    assert "_token_id is" not in capsys.readouterr().err
    for name in ("config.json", "generation_config.json"):
        assert [read(out / name)[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [1, 2, 3]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (zeros / name).read_bytes()
    assert verify(out) == 0


def test_a_tokenizer_that_is_too_large(tiny_ouro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_ouro(tmp_path / "small", vocab_size=128)
    shutil.copy(tiny_ouro / "tokenizer.json", source)
    assert verify(source) == 1
    assert "the tokenizer has 256 tokens, the model 128 (vocab_size)" in capsys.readouterr().out


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def drop_a_tensor(directory: Path) -> None:
    change_weights(directory, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def rename_a_key(directory: Path) -> None:
    change_weights(directory, lambda t: t.update({"model.final_norm.weight": t.pop("model.norm.weight")}))


def zero_eos(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=1)


def stale_heads(directory: Path) -> None:
    edit(directory / "config.json", num_attention_heads=2, num_key_value_heads=2, head_dim=64)


def wrong_theta(directory: Path) -> None:
    edit(directory / "config.json", rope_theta=10000.0)


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: len(content) // 2])


def change_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text((directory / "tokenizer.json").read_text() + " ")


BREAKAGES = {
    drop_a_tensor: ["names", "1 missing: model.layers.1.mlp.up_proj.weight"],
    rename_a_key: ["names", "renamed: model.norm.weight -> model.final_norm.weight (equal content)"],
    zero_eos: ["token ids", "generation_config.json: eos_token_id is 1, the tokenizer's is 0 ('t0')"],
    stale_heads: ["config", "num_attention_heads: got 2, exported 4"],
    wrong_theta: ["config", "is of another model (rope_theta): rope_theta: got 10000.0, exported 1000000.0"],
    truncate: ["files", "model.safetensors: not a whole safetensors file"],
    change_the_tokenizer: ["other files", "tokenizer.json (got"],
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_verify_names_the_breakage(
    tiny_ouro: Path, tmp_path: Path, breakage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each named accident fails its line of the table and is named there; before it, everything was fine."""
    out = tmp_path / "hf"
    assert convert(["export", str(tiny_ouro), str(out)]) == 0 and verify(out, "--against", tiny_ouro) == 0
    breakage(out)
    capsys.readouterr()
    assert verify(out) == 1
    line, words = BREAKAGES[breakage]
    (failed,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith(f"{line} ")]
    assert " FAILED " in failed and words in failed, failed


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (rename_a_key, "renamed: model.norm.weight -> model.final_norm.weight (same shape)"),
        (stale_heads, "num_attention_heads: got 2, there 4"),
        (wrong_theta, "rope_theta: got 10000.0, there 1000000.0"),
    ],
)
def test_verify_against_another_model_without_a_record(
    tiny_ouro: Path, tmp_path: Path, breakage: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that is no export of ours: a checkpoint to compare with knows its model, too."""
    run = write_run(tmp_path / "run", tiny_ouro)
    other = tmp_path / "other"
    shutil.copytree(tiny_ouro, other)
    breakage(other)
    assert verify(other, "--against", run) == 1
    assert words in capsys.readouterr().out


def test_packed_experts(tiny_olmoe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts stacked in one tensor per layer, as transformers 5 holds them in memory."""
    out = tmp_path / "hf"
    assert convert(["export", str(tiny_olmoe), str(out)]) == 0

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        stem = "model.layers.0.mlp.experts"
        parts = {p: [tensors.pop(f"{stem}.{e}.{p}_proj.weight") for e in range(8)] for p in ("gate", "up", "down")}
        tensors[f"{stem}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
        tensors[f"{stem}.down_proj"] = torch.stack(parts["down"])

    assert sum(".experts." in name for name in HFDirectory(out).tensors) == 2 * 8 * 3
    change_weights(out, pack)
    assert verify(out) == 1
    printed = capsys.readouterr().out
    assert "packed experts: model.layers.0.mlp.experts.down_proj, model.layers.0.mlp.experts.gate_up_proj" in printed
    assert "renamed" not in printed


def test_two_thetas_that_disagree(tiny_ouro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers would take the inner one, vLLM's users expect the outer one: refused."""
    other = tmp_path / "other"
    shutil.copytree(tiny_ouro, other)
    edit(other / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert verify(other) == 1
    assert "rope_theta: got 1000000.0, and 10000.0 in rope_parameters" in capsys.readouterr().out


def test_weights_that_pass_by_are_exported_as_stored_ones(tiny_ouro: Path, tmp_path: Path) -> None:
    """Tensors that come once and in order leave the directory that they came from; another order is refused."""
    source = HFDirectory(tiny_ouro)
    options = {"where": tmp_path, "source": source, "depth": "fixed:2", "dtype": "float32"}
    names = list(open_weights(tiny_ouro).expected())
    passing = passing_weights(((name, source.read_copy(name)) for name in names), **options)
    report = export_weights(passing, tmp_path / "hf")
    assert "fixed:2" in report.depth
    stored = open_weights(tmp_path / "hf")
    assert all(torch.equal(tensor, source.read(name)) for name, tensor in stored.read(names))

    shuffled = passing_weights(((name, source.read_copy(name)) for name in names[::-1]), **options)
    with pytest.raises(RuntimeError, match=f"got tensor '{names[-1]}', expected '{names[0]}'"):
        export_weights(shuffled, tmp_path / "other")
