"""Checks a Hugging Face directory: against its config and tokenizer, what its export recorded, other weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from adapters.contract import Manifest
from adapters.hf_convert import files
from adapters.hf_convert.directory import CONFIG, INDEX, HFDirectory, read_json
from adapters.hf_convert.dtypes import DTYPES
from adapters.hf_convert.export import ExportRecord, read_record
from adapters.hf_convert.files import RECORD
from adapters.hf_convert.manifest import spec_of
from adapters.hf_convert.names import listing, name_problems, value_problems
from tether.checks import Check, check, table
from tether.stored import Weights, open_weights
from tether.token_ids import token_problems
from tether.verify_config import against_source, config_differences
from tether.verify_names import explain_names
from tether.verify_run import RunOptions, run_checks

__all__ = ["Check", "table", "verify"]


def verify(directory: Path, *, against: Weights | None = None, run: RunOptions | None = None) -> list[Check]:
    """Reads everything once, and runs the model if asked to.

    Args:
        against: other weights that must be equal, with the config of their model.
        run: how to load the directory, sample from it and compare it with the trainer; None only reads it.

    Returns:
        The lines of the table. After one that leaves nothing to read (no weights, no usable config) none follow.
    """
    try:
        weights = open_weights(directory)
        record = read_record(directory)
        expected, config = weights.expected(), weights.config()
    except ValueError as error:
        return [Check(name="files", passed=False, detail=str(error))]
    against = against.without_padding() if against else None
    manifest, not_finite = _read_all(weights)
    names = name_problems(weights.shapes, expected)
    if names:
        names += explain_names(weights.shapes, expected, got=manifest, recorded=record.manifest if record else None)
    checks = [
        check("files", [], f"{CONFIG} and whole safetensors"),
        check("names", names, f"{len(expected)} tensors, exactly those of the config"),
        check("shapes", value_problems("shape", weights.shapes, expected), "as the config says"),
        _dtypes(weights),
        *([_index(weights.reader)] if isinstance(weights.reader, HFDirectory) and _is_sharded(weights) else []),
        check("values", not_finite, "all finite"),
        _token_ids(directory),
        *(_recorded(weights, record, manifest) if record else []),
    ]
    if against is not None:
        theirs, _ = _read_all(against)
        checks += [against_source(weights, against), _digests("weights", manifest, theirs, f"bitwise {against.path}")]
    if run is None:
        return checks
    if any(c.passed is False for c in checks if c.name in ("names", "shapes", "dtypes", "values")):
        return [*checks, Check(name="loads", passed=None, detail="not tried with such tensors")]
    truth = against.source.config if against else record.config if record else weights.source.config
    return [*checks, *run_checks(weights, config, truth=truth, options=run)]


def _recorded(weights: Weights, record: ExportRecord, manifest: Manifest) -> list[Check]:
    """What the export said, against what is there."""
    now = files.digests(weights.path)
    changed = name_problems(now, record.files) + value_problems("content", now, record.files)
    return [
        check("config", config_differences(weights, record.config, "exported"), "as it was exported"),
        check("other files", changed, f"{len(now)} to the byte as they were exported"),
        _digests("digests", manifest, record.manifest, f"equal to those of {RECORD}"),
    ]


def _token_ids(directory: Path) -> Check:
    try:
        return check("token ids", token_problems(directory), "the configs name the tokenizer's")
    except ValueError as error:
        return check("token ids", [str(error)], "")


def _dtypes(weights: Weights) -> Check:
    """One dtype for all, and the one that the config declares."""
    found = sorted(set(weights.dtypes.values()))
    problems = [f"got {found}, expected one of {sorted(DTYPES)} for all tensors"] * (
        len(found) != 1 or found[0] not in DTYPES
    )
    declared = weights.source.config.get("dtype") or weights.source.config.get("torch_dtype")
    if declared is not None and [declared] != found:
        problems.append(f"{CONFIG} declares {declared!r}, stored as {listing(found)}")
    return check("dtypes", problems, f"all {listing(found)}")


def _is_sharded(weights: Weights) -> bool:
    return (weights.path / INDEX).is_file()


def _index(directory: HFDirectory) -> Check:
    got = read_json(directory.path / INDEX).get("metadata", {}).get("total_size")
    size = sum(DTYPES[t.dtype].itemsize * _count(t.shape) for t in directory.tensors.values() if t.dtype in DTYPES)
    return check("index", [f"total_size is {got!r}, the tensors take {size}"] * (got != size), f"total_size {size}")


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _read_all(weights: Weights) -> tuple[Manifest, list[str]]:
    """Every tensor described, and those with values that are not finite; one tensor in memory at a time."""
    not_finite: list[str] = []

    def specs() -> Iterator[Any]:
        for name, tensor in weights.read(weights.shapes):
            if not torch.isfinite(tensor).all():
                not_finite.append(name)
            yield spec_of(name, tensor)

    manifest = Manifest(tensors=tuple(specs()))
    return manifest, [f"{len(not_finite)} not finite: {listing(not_finite)}"] if not_finite else []


def _digests(name: str, got: Manifest, expected: Manifest, fine: str) -> Check:
    ours, theirs = ({t.name: f"{t.dtype} {t.digest}" for t in manifest.tensors} for manifest in (got, expected))
    return check(name, name_problems(ours, theirs) + value_problems("content", ours, theirs), fine)
