"""Finds the weights that a path means (a run, a checkpoint, a Hugging Face directory) and the model they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adapters.hf_convert.directory import CONFIG, HFDirectory, read_json
from adapters.hf_convert.dtypes import dtype_name
from adapters.megatron import checkpoint_files
from adapters.megatron.checkpoint_reader import CheckpointReader
from providers.registry import provider

RUN_FILE = "run.json"
OPTIMIZER_PREFIX = "optimizer."
"""Megatron keeps moments and master weights under this prefix; every other tensor is a parameter."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Stored weights, opened: what there is, and how to read it one tensor at a time."""

    path: Path
    """The Hugging Face directory or the checkpoint."""
    source: HFDirectory
    """The Hugging Face directory that says which model this is and holds its tokenizer."""
    reader: HFDirectory | CheckpointReader | Passing
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    depth: str | None = None
    """The setting `depth` of the run that trained them; None where no run says."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole CPU tensor, without padding of the vocabulary) in the order of `names`."""
        if isinstance(self.reader, HFDirectory):
            directory = self.reader
            return ((name, directory.read_copy(name)) for name in names)
        stored = self.reader.read(names)
        return ((name, t if t.shape == self.shapes[name] else t[: self.shapes[name][0]]) for name, t in stored)

    def without_padding(self) -> Weights:
        """The same without the rows that a trainer added to the vocabulary to divide it: those past `vocab_size`.

        Only a checkpoint may have such rows: those who read a Hugging Face directory take its shapes as they are.
        Raises what `config` raises.
        """
        if isinstance(self.reader, HFDirectory):
            return self
        expected, rows = self.expected(), self.config().vocab_size
        shapes = dict(self.shapes)
        for name, shape in expected.items():
            stored = shapes.get(name, ())
            if shape[0] == rows and stored[1:] == shape[1:] and stored[:1] > shape[:1]:
                shapes[name] = shape
        return replace(self, shapes=shapes)

    @property
    def model_type(self) -> str:
        return str(self.source.config.get("model_type"))

    def config(self) -> Any:
        """The provider's config.

        Raises:
            ValueError: it is of no known model, or wrong.
        """
        where = str(self.source.path / CONFIG)
        return provider(self.model_type, "config").Config.from_hf(self.source.config, where=where)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that the config asks for, in checkpoint order. Raises what `config` raises."""
        tensors = provider(self.model_type, "physical").physical_tensors(self.config())
        return {name: tensor.shape for name, tensor in tensors.items()}


class Passing:
    """Tensors that come one after the other and can be read once, in their own order."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises RuntimeError if another tensor comes than the one whose turn it is."""
        for name in names:
            got, tensor = next(self._tensors, (None, None))
            if got != name or tensor is None:
                raise RuntimeError(f"got tensor {got!r}, expected {name!r}: weights are read in checkpoint order")
            yield name, tensor
            del tensor


def passing_weights(
    tensors: Iterator[tuple[str, torch.Tensor]], *, where: Path, source: HFDirectory, depth: str, dtype: str
) -> Weights:
    """Weights that a trainer of `source`'s model yields in checkpoint order, each whole and in `dtype`."""
    shapes = {name: info.shape for name, info in source.tensors.items()}
    reader, dtypes = Passing(tensors), dict.fromkeys(shapes, dtype)
    return Weights(path=where, source=source, reader=reader, shapes=shapes, dtypes=dtypes, depth=depth)


def open_weights(path: Path, *, source: Path | None = None, fallback: Path | None = None) -> Weights:
    """Opens a run directory (its newest checkpoint), a checkpoint directory or a Hugging Face directory.

    Args:
        source: for a checkpoint, the Hugging Face directory of its model; by default the one that its run names.
        fallback: the one to take when that is not there.

    Raises:
        ValueError: the path is none of the three, what it holds is damaged, or the source cannot be found.
    """
    if (path / CONFIG).is_file():
        directory = HFDirectory(path)
        shapes = {name: info.shape for name, info in directory.tensors.items()}
        dtypes = {name: info.dtype for name, info in directory.tensors.items()}
        return Weights(path=path, source=directory, reader=directory, shapes=shapes, dtypes=dtypes)
    checkpoint = find_checkpoint(path)
    reader = CheckpointReader(checkpoint)
    parameters = [key for key in reader.shapes if not key.startswith(OPTIMIZER_PREFIX)]
    return Weights(
        path=checkpoint,
        source=HFDirectory(source or _recorded_source(checkpoint, fallback)),
        reader=reader,
        shapes={name: reader.shapes[name] for name in parameters},
        dtypes={name: dtype_name(reader.dtypes[name]) for name in parameters},
        depth=_run_of(checkpoint).get("settings", {}).get("depth"),
    )


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one of a run or of its `checkpoints` directory.

    Raises:
        ValueError: there is none, or the one that is meant is not whole.
    """
    if (path / checkpoint_files.DESCRIPTION).is_file():
        if problem := checkpoint_files.problem(path):
            raise ValueError(f"{path}: damaged checkpoint, {problem}; copy it again")
        return path
    for directory in (path, path / "checkpoints"):
        if directory.is_dir() and (newest := checkpoint_files.latest(directory)):
            return newest
    raise ValueError(
        f"{path}: neither a Hugging Face directory (no {CONFIG}) nor a complete checkpoint "
        f"(no {checkpoint_files.DESCRIPTION}), nor a run that has one"
    )


def _recorded_source(checkpoint: Path, fallback: Path | None) -> Path:
    """The model that a checkpoint comes from, as its own description or the run.json of its run says."""
    recorded = checkpoint_files.read_description(checkpoint).get("extra", {}).get("model")
    if recorded is None:
        recorded = _run_of(checkpoint).get("model")
    if recorded is not None and Path(recorded).is_dir():
        return Path(recorded)
    if fallback is not None:
        return fallback
    raise ValueError(
        f"{checkpoint}: the model that it comes from is not there (recorded: {recorded!r}); "
        "say where its config.json and tokenizer are with --source HF_DIR"
    )


def _run_of(checkpoint: Path) -> dict[str, Any]:
    """run.json of the run that a checkpoint lies in; {} elsewhere."""
    run_file = checkpoint.absolute().parent.parent / RUN_FILE
    return read_json(run_file) if run_file.is_file() else {}
