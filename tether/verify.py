"""Checks stored weights: against the model's config, against what their export recorded, against other weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from adapters.contract import Manifest
from adapters.hf_convert.directory import CONFIG, INDEX, HFDirectory, read_json
from adapters.hf_convert.dtypes import DTYPES
from adapters.hf_convert.export import RECORD, read_record
from adapters.hf_convert.manifest import spec_of
from adapters.hf_convert.names import listing, name_problems, value_problems
from tether.stored import Weights


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    passed: bool
    detail: str


def verify(weights: Weights, *, against: Weights | None = None) -> list[Check]:
    """Reads all tensors once and checks names, shapes, dtypes, index, values and digests.

    Raises:
        ValueError: config.json itself is wrong; the weights cannot be judged.
    """
    expected = weights.expected()
    checks = [
        _check(
            "names", name_problems(weights.shapes, expected), f"{len(expected)} tensors, exactly those of the config"
        ),
        _check("shapes", value_problems("shape", weights.shapes, expected), "as the config says"),
        _dtypes(weights),
    ]
    if isinstance(weights.reader, HFDirectory) and (weights.path / INDEX).is_file():
        checks.append(_index(weights.reader))
    manifest, not_finite = _read_all(weights)
    checks.append(_check("values", not_finite, "all finite"))
    recorded = read_record(weights.path)
    if recorded is not None:
        checks.append(_digests("recorded digests", manifest, recorded, f"equal to those of {RECORD}"))
    if against is not None:
        theirs, _ = _read_all(against)
        checks.append(_digests("against", manifest, theirs, f"bitwise equal to {against.path}"))
    return checks


def table(checks: list[Check]) -> str:
    """The checks as text, one line each."""
    width = max(len(check.name) for check in checks)
    return "\n".join(
        f"{check.name:<{width}}  {'ok' if check.passed else 'FAILED':<6}  {check.detail}" for check in checks
    )


def _check(name: str, problems: list[str], fine: str) -> Check:
    return Check(name=name, passed=not problems, detail="; ".join(problems) or fine)


def _dtypes(weights: Weights) -> Check:
    """One dtype for all, and for a Hugging Face directory the one that its config declares."""
    found = sorted(set(weights.dtypes.values()))
    problems = [f"got {found}, expected one of {sorted(DTYPES)} for all tensors"] * (
        len(found) != 1 or found[0] not in DTYPES
    )
    declared = weights.source.config.get("dtype") or weights.source.config.get("torch_dtype")
    if isinstance(weights.reader, HFDirectory) and declared is not None and [declared] != found:
        problems.append(f"{CONFIG} declares {declared!r}, stored as {listing(found)}")
    return _check("dtypes", problems, f"all {listing(found)}")


def _index(directory: HFDirectory) -> Check:
    got = read_json(directory.path / INDEX).get("metadata", {}).get("total_size")
    size = sum(DTYPES[t.dtype].itemsize * _count(t.shape) for t in directory.tensors.values() if t.dtype in DTYPES)
    return _check("index", [f"total_size is {got!r}, the tensors take {size}"] * (got != size), f"total_size {size}")


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _read_all(weights: Weights) -> tuple[Manifest, list[str]]:
    """Every tensor described, and those with values that are not finite; one tensor in memory at a time."""
    not_finite: list[str] = []

    def specs() -> Iterator:
        for name, tensor in weights.read(weights.shapes):
            if not torch.isfinite(tensor).all():
                not_finite.append(name)
            yield spec_of(name, tensor)

    manifest = Manifest(tensors=tuple(specs()))
    return manifest, [f"{len(not_finite)} not finite: {listing(not_finite)}"] if not_finite else []


def _digests(name: str, got: Manifest, expected: Manifest, fine: str) -> Check:
    ours, theirs = ({t.name: f"{t.dtype} {t.digest}" for t in manifest.tensors} for manifest in (got, expected))
    return _check(name, name_problems(ours, theirs) + value_problems("content", ours, theirs), fine)
