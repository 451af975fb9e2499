"""Exports: bitwise, sharded as asked, whole or absent, never over somebody else's directory, in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.hf_convert.directory import HFDirectory
from adapters.hf_convert.export import export_directory, read_record
from adapters.hf_convert.files import RECORD, SideFiles
from adapters.hf_convert.manifest import manifest_of

INDEX = "model.safetensors.index.json"


def stream(directory: HFDirectory) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, directory.read(name)) for name in directory.tensors)


@pytest.fixture
def source(tiny_ouro: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint with every kind of file that goes along, and two kinds that do not."""
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny_ouro.iterdir():
        (source / file.name).symlink_to(file)
    (source / "modeling_ouro.py").write_bytes(b"# remote code\r\n")
    (source / "chat_template.jinja").write_bytes(b"{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_bytes(b"{{ tools }}")
    (source / "README.md").write_bytes(b"a card")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    return source


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def export(source: Path, destination: Path, **options: Any) -> HFDirectory:
    export_directory(tensors=stream(HFDirectory(source)), source=source, destination=destination, **options)
    return HFDirectory(destination)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000, 1])
def test_round_trip_is_bitwise(source: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    """Same names in the same order, same bits, for one shard, several, and one tensor a shard."""
    directory = export(source, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    wanted = HFDirectory(source)
    assert directory.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(directory.read(name), wanted.read(name)) for name in wanted.tensors)
    assert read_record(tmp_path / "out").manifest == manifest_of(stream(wanted))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    if max_shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"] and not (tmp_path / "out" / INDEX).exists()
        return
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    total = sum(t.numel() * 4 for _, t in stream(wanted))
    assert index["metadata"]["total_size"] == total
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    sizes = [sum(t.numel() * 4 for t in load_file(file).values()) for file in files]
    assert all(size <= max_shard_bytes or len(load_file(f)) == 1 for f, size in zip(files, sizes, strict=True)), sizes
    assert len(files) == (38 if max_shard_bytes == 1 else len(files)) > 1


def test_other_files_are_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    """Config, tokenizer, generation config, templates and code arrive unchanged; cards and other weights stay."""
    export(source, tmp_path / "out")
    copied = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert copied == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "modeling_ouro.py"),
        *("chat_template.jinja", "additional_chat_templates/tools.jinja", "model.safetensors", RECORD),
    }
    for name in copied - {"model.safetensors", RECORD}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name


def test_config_updates_change_only_what_they_name(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    directory = export(source, tmp_path / "out", side=SideFiles(updates={"config.json": {"torch_dtype": "bfloat16"}}))
    assert directory.config == {**config, "torch_dtype": "bfloat16"}


def test_replaces_an_earlier_export_and_nothing_else(source: Path, tmp_path: Path) -> None:
    """An earlier export is replaced whole; a foreign directory, a file, a link and the source itself are refused."""
    out = tmp_path / "out"
    out.mkdir()
    export(source, out, max_shard_bytes=1)
    export(source, out)
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    foreign, file, link = tmp_path / "foreign", tmp_path / "file", tmp_path / "link"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("dear")
    file.write_text("dear")
    link.symlink_to(out)
    for destination in (foreign, file, link, source):
        with pytest.raises(ValueError, match="not an earlier export"):
            export(source, destination)
    with pytest.raises(ValueError, match="or is the source itself"):
        export(out, out)
    assert (foreign / "thesis.txt").read_text() == file.read_text() == "dear"


def test_a_failed_export_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """An error half-way leaves the earlier export as it was and no staging directory behind."""
    out = tmp_path / "out"
    before = contents(export(source, out).path)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(stream(HFDirectory(source)))[:5]
        raise RuntimeError("rank 3 died")

    with pytest.raises(RuntimeError, match="rank 3 died"):
        export_directory(tensors=broken(), source=source, destination=out, max_shard_bytes=1)
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_reused_buffers_and_views(source: Path, tmp_path: Path) -> None:
    """A producer may yield one buffer again and again, views, and tensors that share memory."""

    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.zeros(4, 6)
        for number in range(3):
            yield f"reused.{number}", buffer.fill_(number)
        yield "view", buffer[:, 1:3].t()
        yield "whole", buffer
        yield "again", buffer

    export_directory(tensors=reused(), source=source, destination=tmp_path / "out")
    written = HFDirectory(tmp_path / "out")
    assert [written.read(f"reused.{n}").unique().tolist() for n in range(3)] == [[0.0], [1.0], [2.0]]
    assert written.tensors["view"].shape == (2, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [([], "got no tensors"), ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "got tensor 'a' twice")],
)
def test_bad_streams(source: Path, tmp_path: Path, tensors: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_directory(tensors=tensors, source=source, destination=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("formula", [1, 3])
def test_digests_of_another_formula_are_not_compared(source: Path, tmp_path: Path, formula: int) -> None:
    """They would differ in every tensor, as if the weights had changed. The first formula was not named."""
    export(source, tmp_path / "out")
    path = tmp_path / "out" / "tether_export.json"
    record = json.loads(path.read_text())
    assert record.pop("digest_formula") == 2
    path.write_text(json.dumps(record if formula == 1 else record | {"digest_formula": formula}))
    with pytest.raises(ValueError, match=f"digests are of formula {formula}, expected 2.*export again"):
        read_record(tmp_path / "out")


MEMORY = """
import resource, sys, torch
from pathlib import Path
from adapters.hf_convert.export import export_directory
from adapters.hf_convert.manifest import spec_of
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
def stream():
    for i in range(24):
        yield f"t{i}", torch.full((4 << 20,), float(i))
spec_of("warm", torch.full((4 << 20,), 1.0))
before = peak()
export_directory(tensors=stream(), source=Path(sys.argv[1]), destination=Path(sys.argv[2]), max_shard_bytes=64 << 20)
print(peak() - before)
"""


def test_memory_stays_at_one_shard_and_one_tensor(source: Path, tmp_path: Path) -> None:
    """384 MB in 16 MB tensors and 64 MB shards must not take more than a shard and a tensor.

    The peak before the export already holds one tensor and the compiled digest, so a shard is left: 64 MB and two for
    all else. Keeping the previous tensor while the next is made takes 16 MB more, the previous shard 48 MB more.
    """
    command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "out")]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1000000",
    }  # freed tensors go back, so the peak is what we hold
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    growth = int(run.stdout)
    print(f"peak grew by {growth} MB")
    assert growth <= 66
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 6
