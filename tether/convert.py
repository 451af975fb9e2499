"""Moves weights between Hugging Face directories and Megatron checkpoints, and checks what is stored.

    python -m tether.convert export RUN_OR_CHECKPOINT HF_DIR
    python -m tether.convert import HF_DIR CHECKPOINT_DIR
    python -m tether.convert verify HF_DIR [--against RUN_OR_CHECKPOINT_OR_HF_DIR]

Tensors pass through unchanged and one at a time, by their own names: a round trip is bitwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from adapters.contract import Manifest
from adapters.hf_convert.dtypes import DTYPES
from adapters.hf_convert.export import DEFAULT_SHARD_BYTES, export_directory
from adapters.hf_convert.names import name_problems, raise_problems, value_problems
from tether.importing import import_weights
from tether.stored import Weights, open_weights
from tether.verify import table, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 when `verify` finds a fault, 2 when the input cannot be used."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ValueError as error:
        print(f"tether convert: {error}", file=sys.stderr)
        return 2


def export_weights(
    weights: Weights, destination: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES, dtype: str | None = None
) -> Manifest:
    """Writes stored weights as a Hugging Face directory, with the config, tokenizer and code of their source.

    Args:
        dtype: convert to this one and say so in config.json; None keeps what is stored.

    Raises:
        ValueError: the weights are not exactly those of the source's config, or the destination is taken.
    """
    expected = weights.expected()
    problems = name_problems(weights.shapes, expected) + value_problems("shape", weights.shapes, expected)
    raise_problems(weights.path, problems, advice=f"It was not made from {weights.source.path}")
    return export_directory(
        tensors=_converted(weights.read(expected), dtype),
        source=weights.source.path,
        destination=destination,
        max_shard_bytes=max_shard_bytes,
        config_updates=_dtype_update(weights, dtype),
    )


def _converted(tensors: Iterator[tuple[str, torch.Tensor]], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor if dtype is None else tensor.to(DTYPES[dtype])


def _dtype_update(weights: Weights, dtype: str | None) -> dict[str, str]:
    """What config.json must say instead, in the spelling it uses: `dtype` (transformers 5) or `torch_dtype`."""
    config = weights.source.config
    written = dtype or next(iter(weights.dtypes.values()))
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {key: written for key in keys if config.get(key) != written}


def _export(arguments: argparse.Namespace) -> int:
    weights = open_weights(arguments.weights, source=arguments.source)
    manifest = export_weights(
        weights, arguments.destination, max_shard_bytes=arguments.max_shard_bytes, dtype=arguments.dtype
    )
    print(f"{arguments.destination}: {len(manifest.tensors)} tensors from {weights.path}, digest {manifest.digest}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    checkpoint = import_weights(open_weights(arguments.directory), arguments.destination)
    print(f"{checkpoint}: {arguments.directory} at update 0")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    against = None if arguments.against is None else open_weights(arguments.against, source=arguments.directory)
    checks = verify(open_weights(arguments.directory), against=against)
    print(table(checks))
    return 0 if all(check.passed for check in checks) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tether convert", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    export = command("export", _export, "a run or checkpoint -> a Hugging Face directory")
    export.add_argument("weights", type=Path, help="a run's OUT (its newest checkpoint) or one checkpoint directory")
    export.add_argument("destination", type=Path, help="new, empty, or an earlier export, which is replaced")
    export.add_argument("--source", type=Path, help="directory with config and tokenizer (default: the run's MODEL)")
    export.add_argument("--max-shard-bytes", type=_size, default=DEFAULT_SHARD_BYTES, help="default: %(default)s")
    export.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")

    imported = command("import", _import, "a Hugging Face directory -> a Megatron checkpoint of update 0")
    imported.add_argument("directory", type=Path, help="the Hugging Face directory")
    imported.add_argument("destination", type=Path, help="where iter_0000000 is written; holds no checkpoint yet")

    check = command("verify", _verify, "names, shapes, dtypes, values and digests of a Hugging Face directory")
    check.add_argument("directory", type=Path, help="the Hugging Face directory")
    check.add_argument("--against", type=Path, help="a run, checkpoint or Hugging Face directory that must be equal")
    return parser


def _size(text: str) -> int:
    """An integer number of bytes, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
