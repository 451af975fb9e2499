"""Looks at checkpoints: which there are, what one holds, how two differ, whether one is whole. Changes nothing.

    python -m tether.checkpoint ls     OUT
    python -m tether.checkpoint show   PATH [--digests]
    python -m tether.checkpoint diff   PATH PATH [--all]
    python -m tether.checkpoint verify PATH

PATH is a checkpoint directory (iter_NNNNNNN), or a run or its `checkpoints` directory, which means its newest one. The
exit code is 0, 1 if a diff or a verify found something, 2 for a path that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.hf_convert.digest import tensor_digest
from adapters.hf_convert.dtypes import dtype_name
from adapters.megatron import checkpoint_files as files
from adapters.megatron.checkpoint_reader import CheckpointReader
from tether.stored import OPTIMIZER_PREFIX, find_checkpoint

MASTERS = {"distributed": "param", "replicated": "fp32_param"}
"""Under which name each kind of optimizer keeps its fp32 masters (bf16 training; in fp32 "replicated" needs none)."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def main(argv: Sequence[str] | None = None) -> int:
    """One command line; see the module. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        lines, code = arguments.run(arguments)
        print("\n".join(lines))
        return code
    except ValueError as error:
        print(f"tether checkpoint: {error}", file=sys.stderr)
        return 2


def list_all(path: Path) -> list[str]:
    """One line per checkpoint of a run, oldest first, the damaged ones too."""
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = files.checkpoints(directory)
    if not found:
        raise ValueError(f"{directory}: no checkpoints (iter_NNNNNNN)")
    pointer = directory / files.POINTER
    named = pointer.read_text().strip() if pointer.is_file() else None
    rows = [["checkpoint", "state", "version", "format", "optimizer", "layout", "size", "written"]]
    rows += [_row(each, is_latest=each.name == named) for each in found]
    if named is not None and named not in {each.name for each in found}:
        rows.append([named, "damaged, latest: it is not there", *[""] * 6])
    return _aligned(rows)


def show(path: Path, *, digests: bool = False) -> list[str]:
    """What a checkpoint says of itself, and its tensors."""
    checkpoint = find_checkpoint(path)
    description, reader = files.read_description(checkpoint), CheckpointReader(checkpoint)
    lines = [str(checkpoint), *_aligned([["  " + name, value] for name, value in _facts(description).items()])]
    contract = description.get("extra", {}).get("contract") or {}
    lines += ["run contract:", *_aligned([["  " + name, repr(value)] for name, value in sorted(contract.items())])]
    rows = [[f"  {name}", str(list(reader.shapes[name])), dtype_name(reader.dtypes[name])] for name in _names(reader)]
    if digests:
        values = dict(_digests(reader))
        rows = [[*row, values[row[0].strip()]] for row in rows]
    return [*lines, f"{len(rows)} tensors:", *_aligned(rows)]


def diff(one: Path, other: Path, *, show_all: bool = False) -> tuple[list[str], int]:
    """What differs between two checkpoints and by how much; 0 or 1, whether anything does. Tensors decide it."""
    paths = [find_checkpoint(path) for path in (one, other)]
    descriptions = [files.read_description(path) for path in paths]
    readers = [CheckpointReader(path) for path in paths]
    facts = [{**_facts(each), **(each.get("extra", {}).get("contract") or {})} for each in descriptions]
    lines = [f"{'-+'[i]} {path}" for i, path in enumerate(paths)]
    lines += _aligned([[f"  {name}", repr(a), "->", repr(b)] for name, a, b in _unequal(*facts)])
    shapes = [{n: (list(r.shapes[n]), dtype_name(r.dtypes[n])) for n in r.shapes} for r in readers]
    lines += _aligned([[f"  {name}", str(a), "->", str(b)] for name, a, b in _unequal(*shapes)])
    common = [name for name in _names(readers[0]) if shapes[0][name] == shapes[1].get(name)]
    found = list(_tensor_differences(readers, common))
    rows = [_difference_row(each) for each in sorted(found, key=lambda each: -each["max"])]
    shown = rows if show_all else rows[:20]
    if rows:
        lines += _aligned([["  tensor", "max |a-b|", "mean |a-b|", "max |a|", "values that differ"], *shown])
    if len(rows) > len(shown):
        lines.append(f"  ... {len(rows) - len(shown)} more (--all)")
    differs = bool(rows) or shapes[0] != shapes[1]
    return [*lines, f"{len(common) - len(rows)} of {len(common)} common tensors are bitwise equal"], int(differs)


def verify(path: Path) -> tuple[list[str], int]:
    """Every byte against its digest, every tensor's name and shape, every value; 0 if all is well."""
    checkpoint = (
        path if (path / files.DESCRIPTION).is_file() or path.name.startswith("iter_") else find_checkpoint(path)
    )
    problems = [why] if (why := files.problem(checkpoint, deep=True)) else []
    if not problems:
        description, reader = files.read_description(checkpoint), CheckpointReader(checkpoint)
        problems = [*_missing(description, reader), *_not_finite(reader)]
    if problems:
        return [f"{checkpoint}: DAMAGED", *(f"  {problem}" for problem in problems)], 1
    total = sum(size for size, _ in description["files"].values())
    return [f"{checkpoint}: whole; {len(reader.shapes)} tensors, {total / 1e6:.1f} MB, all digests as written"], 0


def _row(path: Path, *, is_latest: bool) -> list[str]:
    why = files.problem(path)
    state = ("damaged" if why else "complete") + (", latest" if is_latest else "")
    if why:
        return [path.name, f"{state}: {why}", *[""] * 6]
    description = files.read_description(path)
    facts = _facts(description)
    size = sum(size for size, _ in description["files"].values())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime((path / files.DESCRIPTION).stat().st_mtime))
    shown = [facts[name] for name in ("version", "format", "optimizer", "layout")]
    return [path.name, state, *shown, f"{size / 1e6:.1f} MB", when]


def _facts(description: Mapping[str, Any]) -> dict[str, str]:
    extra, layout = description.get("extra", {}), description.get("layout", {})
    return {
        "update": str(description.get("update")),
        "version": f"({extra.get('incarnation', '-')}, {extra.get('update', description.get('update'))})",
        "position": str(extra.get("position", "-")),
        "format": str(description.get("sharding")),
        "optimizer": str(description.get("optimizer")),
        "layout": " ".join(f"{name.removesuffix('_parallel')}={size}" for name, size in layout.items()),
        "dtype": str(description.get("dtype")),
    }


def _names(reader: CheckpointReader) -> list[str]:
    """Parameters first, then the optimizer's state."""
    return sorted(reader.shapes, key=lambda name: (name.startswith(OPTIMIZER_PREFIX), name))


def _digests(reader: CheckpointReader) -> Iterator[tuple[str, str]]:
    for name, tensor in reader.read(_names(reader)):
        yield name, tensor_digest(tensor)


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value here, value there) of what is not the same; None stands for a missing one."""
    names = sorted(one.keys() | other.keys())
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def _tensor_differences(readers: Sequence[CheckpointReader], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for (name, a), (_, b) in zip(*(reader.read(names) for reader in readers), strict=True):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):  # bits: NaN equals itself, -0 is not 0
            apart, scale = (a.double() - b.double()).abs(), a.double().abs()
            yield {
                "name": name,
                "max": float(apart.max()),
                "mean": float(apart.mean()),
                "scale": float(scale.max()),
                "count": int((a != b).sum()),
                "of": a.numel(),
            }


def _difference_row(each: Mapping[str, Any]) -> list[str]:
    figures = [f"{each[name]:.3e}" for name in ("max", "mean", "scale")]
    return [f"  {each['name']}", *figures, f"{each['count']} of {each['of']}"]


def _missing(description: Mapping[str, Any], reader: CheckpointReader) -> list[str]:
    """Tensors that the description promises and the files do not hold, or hold in another shape."""
    expected = description["tensors"]
    problems = [
        f"{name}: stored {list(reader.shapes.get(name, ()))}, expected {shape}"
        for name, shape in expected.items()
        if list(reader.shapes.get(name, ())) != shape
    ]
    parameters = {name for name in reader.shapes if not name.startswith(OPTIMIZER_PREFIX)}
    problems += [f"{name}: belongs to no parameter of the model" for name in sorted(parameters - expected.keys())]
    if description["sharding"] == "reshardable":
        kinds = [*MOMENTS]
        if description["optimizer"] == "distributed" or description["dtype"] != "float32":
            kinds.append(MASTERS[description["optimizer"]])
        prefix = f"{OPTIMIZER_PREFIX}state."
        held = {kind: {n for n in reader.shapes if n.startswith(f"{prefix}{kind}.")} for kind in kinds}
        trained = {name.removeprefix(f"{prefix}{MOMENTS[0]}.") for name in held[MOMENTS[0]]}
        for kind in kinds:
            absent = sorted(name for name in trained if f"{prefix}{kind}.{name}" not in held[kind])
            problems += [f"{prefix}{kind}.{name}: missing" for name in absent]
    return problems


def _not_finite(reader: CheckpointReader) -> list[str]:
    if any(".distributed." in name for name in reader.shapes):  # same_layout: padding between parameters is anything
        names = [name for name in reader.shapes if not name.startswith(OPTIMIZER_PREFIX)]
    else:
        names = list(reader.shapes)
    return [f"{n}: values that are not finite" for n, t in reader.read(names) if not torch.isfinite(t).all()]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tether checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], tuple[list[str], int]], help: str) -> Any:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        added.add_argument("path", type=Path, help="a checkpoint, a run or its checkpoints directory")
        return added

    command("ls", lambda a: (list_all(a.path), 0), "one line per checkpoint of a run")
    shown = command("show", lambda a: (show(a.path, digests=a.digests), 0), "what a checkpoint holds")
    shown.add_argument("--digests", action="store_true", help="also the digest of every tensor (reads all of them)")
    differ = command("diff", lambda a: diff(a.path, a.other, show_all=a.all), "what differs between two checkpoints")
    differ.add_argument("other", type=Path, help="the checkpoint to compare with")
    differ.add_argument("--all", action="store_true", help="every tensor that differs, not the 20 worst")
    command("verify", lambda a: verify(a.path), "whether every byte of a checkpoint is as it was written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
