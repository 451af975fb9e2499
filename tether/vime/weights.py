"""Brings the rollout's engine to the weights that training has committed, before it draws the next samples.

The engine belongs to the rollout process, whatever kind it is; training reaches it through directories. A directory
that `publication` has not committed does not exist here, and what the engine refuses it does not serve: the transaction
is `contract.Engine.publish`, and the version counts only once it has succeeded.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from adapters.contract import Engine, Version
from adapters.hf_convert.directory import HFDirectory
from tether.vime.arguments import ModelFacts
from tether.vime.publication import COMMITTED, committed
from tether.vime.versions import version_number

logger = logging.getLogger(__name__)
KEPT = 2
"""Directories that are left: the one that is served, and one before it."""


class CommittedWeights:
    """What training has committed so far, and how much of it the engine has.

    Args:
        parent: where training writes; None if weights never change (rollouts without training).
    """

    def __init__(self, parent: Path | None, facts: ModelFacts) -> None:
        self.parent, self.facts = parent, facts
        self.served: Version | None = None

    def bring(self, engine: Engine) -> None:
        """Publishes what is newer than what the engine has from us. Raises what `Engine.publish` does.

        Raises:
            ValueError: the directory is not the model's, or its version is older than what is served.
        """
        newest = None if self.parent is None else committed(self.parent)
        if newest is None:
            return
        number, directory = newest
        if self.served is not None and number == self.served.update:
            return
        if self.served is not None and number < self.served.update:
            raise ValueError(f"{self.parent}: version {number} is committed, expected more than {self.served.update}")
        # A start opens a new incarnation: an engine that outlived the run before may serve a higher number.
        incarnation = engine.weight_version().incarnation + 1 if self.served is None else self.served.incarnation
        version = Version(incarnation, number)
        report = engine.publish(version, self._tensors(HFDirectory(directory)))
        self.served = version
        logger.info("weights %s (%s) are served, %.3g s", version, directory, sum(report.seconds.values()))
        self._prune(directory)

    def _tensors(self, source: HFDirectory) -> Iterator[tuple[str, Tensor]]:
        source.check({name: tensor.shape for name, tensor in self.facts.table.items()})
        for name in self.facts.table:
            yield name, source.read_copy(name)

    def _prune(self, newest: Path) -> None:
        """Removes directories older than those kept, which --update-weight-disk-keep-files leaves to us."""
        older = sorted(newest.parent.glob("weight_v*"), key=version_number)
        for path in older[: older.index(newest) + 1][:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def where_weights_come(args: Any) -> Path | None:
    """The directory in which training commits weights; None where nothing is trained.

    Raises:
        ValueError: the framework would send weights to its own engines, past ours.
    """
    if getattr(args, "debug_rollout_only", False):
        return None
    transport, mode = getattr(args, "update_weight_transport", None), getattr(args, "update_weight_mode", "full")
    hook = getattr(args, "custom_update_weight_post_write_path", None)
    problems = {
        "--update-weight-transport": (transport, transport == "disk", "disk"),
        "--update-weight-mode": (mode, mode == "full", "full"),
        "--update-weight-disk-keep-files": (
            getattr(args, "update_weight_disk_keep_files", False),
            getattr(args, "update_weight_disk_keep_files", False),
            "it: weights are read when the next samples are drawn",
        ),
        "--custom-update-weight-post-write-path": (
            hook,
            bool(hook),
            f"tether.vime.after_publication, writes {COMMITTED}",
        ),
    }
    if bad := [f"{flag}: got {got!r}, expected {want}" for flag, (got, fine, want) in problems.items() if not fine]:
        raise ValueError("weights would not reach Tether's engine:\n  " + "\n  ".join(bad))
    return Path(args.update_weight_disk_dir)
