"""Weights that the framework has written into a directory: checked, made durable, and committed by one rename.

The framework writes weight_vNNNNNN under --update-weight-disk-dir on all ranks and then calls the hook here. Only what
the hook has committed exists for the rollout side (`weights`), which publishes it to the engines as a transaction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adapters.durable import replace_file, sync_tree
from adapters.hf_convert.directory import HFDirectory, read_json
from adapters.megatron.runtime import raise_together
from tether.vime.arguments import ModelFacts, facts_of
from tether.vime.versions import remember, version_number

COMMITTED = "tether_committed.json"
"""Names the newest directory that is whole, beside it."""


def after_publication(args: Any, version_dir: str, engines: Sequence[Any]) -> None:
    """For --custom-update-weight-post-write-path. Every rank calls it, after all of them have written.

    Raises:
        ValueError, RuntimeError: on every rank, if the directory is not exactly the model's tensors or is no newer than
            what was committed; the version before stays the committed one.
    """
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            commit(Path(version_dir), facts_of(args))
            remember(args, version_number(version_dir))
        except (OSError, ValueError, RuntimeError) as caught:
            error = caught
    raise_together(error)


def commit(directory: Path, facts: ModelFacts) -> None:
    """Makes a directory the newest version. See `after_publication` for what it raises."""
    number = version_number(directory)
    HFDirectory(directory).check({name: tensor.shape for name, tensor in facts.table.items()})
    sync_tree(directory)
    replace_file(directory.parent / COMMITTED, json.dumps({"directory": directory.name, "version": number}) + "\n")


def committed(parent: Path | str) -> tuple[int, Path] | None:
    """The newest committed version and its directory; None before the first.

    Raises:
        ValueError: the record is not one of `commit`.
    """
    place = Path(parent) / COMMITTED
    if not place.is_file():
        return None
    record = read_json(place)
    directory = Path(parent) / str(record.get("directory"))
    if record.get("version") != version_number(directory):
        raise ValueError(f"{place}: got {record!r}, expected a directory weight_v and its number")
    return version_number(directory), directory
