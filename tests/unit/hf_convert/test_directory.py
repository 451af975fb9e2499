"""Reading Hugging Face directories: slices, sharded sources, and clear errors for everything that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.hf_convert.directory import HFDirectory
from adapters.hf_convert.names import listing
from tests.tiny import OURO_CONFIG, ouro_shapes, write_ouro

INDEX = "model.safetensors.index.json"


def shard(path: Path) -> Path:
    """Rewrites a single-file checkpoint as two shards with an index."""
    tensors = load_file(path / "model.safetensors")
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
    (path / "model.safetensors").unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_ouro(tmp_path / "hf", num_hidden_layers=1, vocab_size=64)


def edit_index(path: Path, edit: dict[str, str | None]) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | edit).items() if v is not None}
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_what_was_written(checkpoint: Path, sharded: bool) -> None:
    """Single file or shards: the same names, shapes, dtypes and bits; slices equal slices of the whole tensor."""
    wanted = load_file(checkpoint / "model.safetensors")
    directory = HFDirectory(shard(checkpoint) if sharded else checkpoint)
    assert directory.config["model_type"] == "ouro"
    assert directory.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        info = directory.tensors[name]
        assert (info.shape, info.dtype) == (tuple(tensor.shape), "float32")
        assert torch.equal(directory.read(name), tensor) and torch.equal(directory.read_copy(name), tensor)
        for dim in range(tensor.dim() if tensor.shape[0] > 1 else 0):
            parts = [directory.read_shard(name, dim=dim, rank=rank, size=2) for rank in range(2)]
            assert all(part.is_contiguous() for part in parts)
            assert torch.equal(torch.cat(parts, dim), tensor)


def test_check_names_every_offender(checkpoint: Path) -> None:
    """Missing, unexpected, misshapen and mistyped tensors all stand in one message, counted and sorted."""
    directory = HFDirectory(checkpoint)
    expected = {name: info.shape for name, info in directory.tensors.items()}
    directory.check(expected, dtype="float32")
    del expected["model.norm.weight"]
    expected |= {"lm_head.bias": (64,), "lm_head.weight": (64, 64)}
    with pytest.raises(ValueError) as caught:
        directory.check(expected)
    for part in (
        "1 missing: lm_head.bias",
        "1 unexpected: model.norm.weight",
        "1 with another shape: lm_head.weight (got (64, 128), expected (64, 64))",
        str(checkpoint),
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"16 with another dtype: .* and 6 more"):
        directory.check({name: info.shape for name, info in directory.tensors.items()}, dtype="bfloat16")


def test_tiny_writer_and_reader_agree(tiny_ouro: Path) -> None:
    """The shared fixture holds what its independent table says."""
    HFDirectory(tiny_ouro).check(ouro_shapes(OURO_CONFIG), dtype="float32")


def test_listing_names_the_first_ten() -> None:
    assert listing("cab") == "a, b, c"
    assert listing(f"n{i:02}" for i in range(12)) == ", ".join(f"n{i:02}" for i in range(10)) + " and 2 more"


@pytest.mark.parametrize("cut", [3, 200, -100])
def test_truncated_file(checkpoint: Path, cut: int) -> None:
    """A file cut anywhere, in its header or its data, is refused on opening, by name."""
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file .* truncated or corrupt"):
        HFDirectory(checkpoint)


def test_missing_parts(checkpoint: Path, tmp_path: Path) -> None:
    """No directory, no config, broken config, no weights: each says which file."""
    with pytest.raises(ValueError, match="no such directory"):
        HFDirectory(tmp_path / "nowhere")
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no model.safetensors and no model.safetensors.index.json"):
        HFDirectory(checkpoint)
    for text, message in (("{", "not valid JSON"), ("[]", "got list, expected a JSON object")):
        (checkpoint / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: {message}"):
            HFDirectory(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        HFDirectory(checkpoint)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"lm_head.weight": None}, "1 unexpected: lm_head.weight in model-0000"),
        ({"lm_head.bias": "model-00001-of-00002.safetensors"}, "1 missing: lm_head.bias in model-00001"),
        ({"lm_head.bias": "model-00003-of-00003.safetensors"}, "1 files that do not exist: model-00003"),
        ({"lm_head.bias": "../model.safetensors"}, "names of files beside it"),
    ],
)
def test_index_and_shards_must_agree(checkpoint: Path, edit: dict[str, str | None], message: str) -> None:
    """An index that lists too little, too much, a missing shard or a file elsewhere is refused."""
    edit_index(shard(checkpoint), edit)
    with pytest.raises(ValueError, match=message):
        HFDirectory(checkpoint)


def test_slices_that_do_not_exist(checkpoint: Path) -> None:
    """A size that does not divide, a rank or dimension out of range, an unknown name: refused, naming the tensor."""
    directory = HFDirectory(checkpoint)
    for wrong in ({"dim": 0, "rank": 0, "size": 5}, {"dim": 2, "rank": 0, "size": 2}, {"dim": 0, "rank": 2, "size": 2}):
        with pytest.raises(ValueError, match=r"'lm_head.weight' of shape \(64, 128\) has no slice"):
            directory.read_shard("lm_head.weight", **wrong)
    with pytest.raises(ValueError, match="no tensor 'lm_head.bias' among its 16"):
        directory.read("lm_head.bias")
