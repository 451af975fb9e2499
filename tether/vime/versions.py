"""Which weight version belongs to which update, kept beside the framework's checkpoints.

The framework counts publications from the start of a process, and a checkpoint of it does not say how many there were.
A run that goes on would give its weights numbers that other weights had before.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from adapters.hf_convert.directory import read_json
from adapters.hf_convert.files import write_json

START = "update_weight_start_version"
"""The framework's argument from which it counts publications."""
FILE = "tether_versions.json"
TRACKER = "latest_checkpointed_iteration.txt"
_last_rollout = -1


def note_rollout(rollout_id: int) -> None:
    """This process has trained on a rollout; what is published next is that update's."""
    global _last_rollout
    _last_rollout = rollout_id


def version_number(directory: Path | str) -> int:
    """The number in the name of a directory that the framework has published, such as weight_v000012.

    Raises:
        ValueError: another kind of name.
    """
    found = re.fullmatch(r"weight_v(\d+)", Path(directory).name)
    if found is None:
        raise ValueError(f"{directory}: got this name for published weights, expected weight_v and a number")
    return int(found[1])


def remember(args: Any, version: int) -> None:
    """Keeps that the weights after the update of this process's last rollout were published as `version`.

    What an abandoned continuation wrote of later rollouts is forgotten.
    """
    if getattr(args, "save", None) is None:
        return
    path = Path(args.save) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {k: v for k, v in _known(path).items() if k < _last_rollout} | {_last_rollout: version}
    staging = path.with_name(f".{FILE}.staging")
    write_json(staging, {str(rollout): number for rollout, number in sorted(known.items())})
    os.replace(staging, path)


def version_to_go_on_from(args: Any) -> int | None:
    """The last version published before the checkpoint that --load resumes; None for a fresh run."""
    load = getattr(args, "load", None)
    if load is None or not (Path(load) / TRACKER).is_file() or getattr(args, "finetune", False):
        return None
    text = (Path(load) / TRACKER).read_text().strip()
    step = getattr(args, "ckpt_step", None)
    if step is None and not text.isdigit():
        return None
    rollout = int(text) if step is None else int(step)
    before = [version for trained, version in _known(Path(load) / FILE).items() if trained < rollout]
    return max(before, default=0)


def set_start_version(args: Any) -> None:
    """Lets this process count on from the checkpoint's version.

    Raises:
        RuntimeError: weights go through a directory, whose name the framework's driver counts as well, and it was not
            told.
    """
    wanted = version_to_go_on_from(args)
    if wanted is None or getattr(args, START, 0) == wanted:
        return
    if getattr(args, "update_weight_transport", None) == "disk":
        raise RuntimeError(
            f"{START}: got {getattr(args, START, 0)!r}, expected {wanted}, the version before the checkpoint in "
            f"{args.load}: put `{START}: {wanted}` into the file of --custom-config-path "
            f"(`python -m tether.vime.versions {args.load}` prints the number)"
        )
    setattr(args, START, wanted)


def _known(path: Path) -> dict[int, int]:
    return {int(rollout): int(number) for rollout, number in read_json(path).items()} if path.is_file() else {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the version from which a run that loads DIRECTORY counts on.")
    parser.add_argument("directory")
    print(version_to_go_on_from(SimpleNamespace(load=parser.parse_args().directory)) or 0)
