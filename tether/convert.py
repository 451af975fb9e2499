"""Moves weights between Hugging Face directories and Megatron checkpoints, and checks what is stored.

    python -m tether.convert export RUN_OR_CHECKPOINT HF_DIR
    python -m tether.convert import HF_DIR CHECKPOINT_DIR
    python -m tether.convert verify HF_DIR [--against RUN_OR_CHECKPOINT_OR_HF_DIR]

Tensors pass through unchanged and one at a time, by their own names: a round trip is bitwise.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from adapters.hf_convert.directory import CONFIG
from adapters.hf_convert.dtypes import DTYPES
from adapters.hf_convert.export import DEFAULT_SHARD_BYTES
from tether.exporting import ExportOptions, export_weights
from tether.importing import import_weights
from tether.settings_rules import REMOTE_CODE
from tether.stored import open_weights
from tether.verify import table, verify
from tether.verify_run import RunOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 when `verify` finds a fault, 2 when the input cannot be used."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ValueError as error:
        print(f"tether convert: {error}", file=sys.stderr)
        return 2


def _export(arguments: argparse.Namespace) -> int:
    weights = open_weights(arguments.weights, source=arguments.source)
    options = ExportOptions(
        max_shard_bytes=arguments.max_shard_size,
        dtype=arguments.dtype,
        remote_code=arguments.remote_code,
        depth=arguments.depth,
        fix_token_ids=arguments.fix_token_ids,
    )
    report = export_weights(weights, arguments.destination, options)
    for warning in report.warnings:
        print(f"tether convert: warning: {warning}", file=sys.stderr)
    tensors, digest = report.manifest.tensors, report.manifest.digest
    print(f"{arguments.destination}: {len(tensors)} tensors from {weights.path}, digest {digest}")
    print(f"{arguments.destination}: {report.depth}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    checkpoint = import_weights(open_weights(arguments.directory), arguments.destination)
    print(f"{checkpoint}: {arguments.directory} at update 0")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    if not (directory / CONFIG).is_file():
        raise ValueError(f"{directory}: not a Hugging Face directory (no {CONFIG})")
    against = None
    if arguments.against is not None:
        against = open_weights(arguments.against, fallback=directory)
    run = None if arguments.files_only else RunOptions(trust_remote_code=arguments.trust_remote_code)
    checks = verify(directory, against=against, run=run)
    print(table(checks))
    return 1 if any(check.passed is False for check in checks) else 0


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
    export.add_argument(
        "--max-shard-size", type=_size, default=DEFAULT_SHARD_BYTES, metavar="SIZE", help="bytes, or 5GB, 2GiB; 5GB"
    )
    export.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")
    export.add_argument(
        "--remote-code",
        choices=REMOTE_CODE,
        default="keep",
        help="code for transformers: ours (written for transformers 5), keep (the source's, default), none",
    )
    export.add_argument("--depth", metavar="POLICY", help="policy to record; default: the one that the run trained at")
    export.add_argument(
        "--fix-token-ids", action="store_true", help="write the tokenizer's bos, eos and pad into the configs"
    )

    imported = command("import", _import, "a Hugging Face directory -> a Megatron checkpoint of update 0")
    imported.add_argument("directory", type=Path, help="the Hugging Face directory")
    imported.add_argument("destination", type=Path, help="where iter_0000000 is written; holds no checkpoint yet")

    check = command("verify", _verify, "whether a Hugging Face directory is whole, right and runs")
    check.add_argument("directory", type=Path, help="the Hugging Face directory")
    check.add_argument("--against", type=Path, help="a run, checkpoint or Hugging Face directory that must be equal")
    check.add_argument("--files-only", action="store_true", help="read it, but do not load it and run nothing")
    check.add_argument(
        "--trust-remote-code", action="store_true", help="run the directory's own code where it is not ours"
    )
    return parser


def _size(text: str) -> int:
    """A number of bytes, at least 1: an integer, or one with KB, MB, GB (powers of 1000), KiB, MiB or GiB."""
    match = re.fullmatch(r"(\d+)(?:([KMG])(i?)B)?", text)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of bytes such as 500000, 500MB or 5GB")
    return int(match[1]) * (1024 if match[3] else 1000) ** (" KMG".index(match[2]) if match[2] else 0)


if __name__ == "__main__":
    sys.exit(main())
