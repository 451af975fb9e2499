"""Writes a Hugging Face directory from a stream of tensors, so that it appears whole or not at all.

One shard is held in memory at a time. Everything is written into a staging directory beside the destination and
flushed to disk before one rename publishes it. Files other than weights are copied byte for byte (`files.py`).

The record, tether_export.json, has every tensor with its digest, the config as it was exported, a checksum of each
other file, and what the caller adds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from adapters.contract import Manifest, TensorSpec
from adapters.durable import sync, sync_tree
from adapters.hf_convert.digest import FORMULA
from adapters.hf_convert.directory import CONFIG, INDEX, SINGLE, read_json
from adapters.hf_convert.dtypes import num_bytes
from adapters.hf_convert.files import RECORD, SideFiles, copy_side_files, write_json
from adapters.hf_convert.manifest import spec_of

DEFAULT_SHARD_BYTES = 5_000_000_000


def export_directory(
    *,
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    destination: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    side: SideFiles | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Manifest:
    """Writes `destination` with these tensors and the other files of `source`.

    Args:
        tensors: (Hugging Face name, whole tensor), taken one at a time; what was taken is copied, so buffers may be
            reused. Memory peaks at one shard and one tensor.
        source: the model directory whose config, tokenizer and code go along.
        destination: new, empty, or an earlier export, which is replaced after the new one is complete.
        max_shard_bytes: a larger tensor gets a shard of its own. One shard is written as model.safetensors, more of
            them with an index.
        side: how the other files differ from the source's; None copies them as they are.
        facts: more entries of the record.

    Returns:
        What was written, in order.

    Raises:
        ValueError: the destination holds something else than an export, a name comes twice, or there are no tensors.
    """
    check_destination(destination, source=source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.with_name(f".{destination.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)  # of an export that was killed
    staging.mkdir()
    try:
        files = copy_side_files(source, staging, side or SideFiles())
        manifest = _write_weights(tensors, staging, max_shard_bytes)
        write_json(staging / RECORD, {
            **(facts or {}),
            "config": read_json(staging / CONFIG),
            "files": files,
            "digest_formula": FORMULA,
            "tensors": msgspec.to_builtins(manifest.tensors),
            "digest": manifest.digest,
        })  # fmt: skip
        sync_tree(staging)
        _publish(staging, destination)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return manifest


def check_destination(destination: Path, *, source: Path) -> None:
    """Raises ValueError if an export must not be written there: only an earlier export is ever replaced."""
    if destination.is_dir() and not destination.is_symlink():
        if not any(destination.iterdir()) or ((destination / RECORD).is_file() and not _same(destination, source)):
            return
    elif not destination.exists() and not destination.is_symlink():
        return
    raise ValueError(
        f"{destination}: exists and is not an earlier export (it has no {RECORD}, or is the source itself); "
        "nothing is overwritten, choose another directory or remove it"
    )


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an export said it wrote."""

    tensors: tuple[TensorSpec, ...]
    config: dict[str, Any]
    files: dict[str, str]
    """SHA-256 of the files that `files.digests` lists."""
    digest_formula: int = 1
    """By which the tensors' digests were taken; the first one was not named."""

    @property
    def manifest(self) -> Manifest:
        return Manifest(tensors=self.tensors)


def read_record(directory: Path) -> ExportRecord | None:
    """The record of an export; None for a directory that is not one."""
    if not (directory / RECORD).is_file():
        return None
    try:
        record = msgspec.convert(read_json(directory / RECORD), ExportRecord)
    except msgspec.ValidationError as error:
        raise ValueError(f"{directory / RECORD}: not the record of an export ({error}); export again") from error
    if record.digest_formula != FORMULA:
        raise ValueError(
            f"{directory / RECORD}: its digests are of formula {record.digest_formula}, expected {FORMULA}; "
            "the tensors cannot be compared with them, export again"
        )
    return record


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _write_weights(tensors: Iterable[tuple[str, torch.Tensor]], staging: Path, max_shard_bytes: int) -> Manifest:
    """Shards are named once their number is known."""
    specs: list[TensorSpec] = []
    files: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for shard in _shards(tensors, max_shard_bytes):
        files.append((staging / f"shard-{len(files)}", list(shard)))
        specs += [spec_of(name, tensor) for name, tensor in shard.items()]
        total_bytes += sum(num_bytes(tensor) for tensor in shard.values())
        save_file(shard, files[-1][0], metadata={"format": "pt"})
        shard.clear()  # before the next one fills
    if len(files) == 1:
        files[0][0].rename(staging / SINGLE)
        return Manifest(tensors=tuple(specs))
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(staging / final)
        weight_map |= dict.fromkeys(names, final)
    write_json(staging / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return Manifest(tensors=tuple(specs))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Fills shards in the order of arrival. Every tensor becomes a contiguous CPU copy that shares no memory."""
    shard: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    size = 0
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"export: got tensor {name!r} twice, expected each name once")
        seen.add(name)
        if shard and size + num_bytes(tensor) > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        size += num_bytes(tensor)
        del tensor  # or it would stay while the next one is made
    if not shard:
        raise ValueError("export: got no tensors, expected those of a whole model")
    yield shard


def _publish(staging: Path, destination: Path) -> None:
    """One rename. An earlier export steps aside first, so a crash in between leaves both under hidden names."""
    retired = destination.with_name(f".{destination.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if destination.exists():
        destination.rename(retired)
    staging.rename(destination)
    sync(destination.parent)
    shutil.rmtree(retired, ignore_errors=True)
