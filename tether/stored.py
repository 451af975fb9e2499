"""Finds the weights that a path means (a run, a checkpoint, a Hugging Face directory) and the model they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from adapters.hf_convert.directory import CONFIG, HFDirectory, read_json
from adapters.hf_convert.dtypes import dtype_name
from adapters.megatron.checkpoint_reader import METADATA, CheckpointReader
from providers.registry import provider

RUN_FILE = "run.json"
LATEST = "latest"
OPTIMIZER_PREFIX = "optimizer."
"""Megatron keeps moments and master weights under this prefix; every other tensor is a parameter."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Stored weights, opened: what there is, and how to read it one tensor at a time."""

    path: Path
    """The Hugging Face directory or the checkpoint."""
    source: HFDirectory
    """The Hugging Face directory that says which model this is and holds its tokenizer."""
    reader: HFDirectory | CheckpointReader
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole CPU tensor) in the order of `names`."""
        if isinstance(self.reader, CheckpointReader):
            return self.reader.read(names)
        directory = self.reader
        return ((name, directory.read(name)) for name in names)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that the model's config asks for, in checkpoint order.

        Raises:
            ValueError: the config is of no known model, or wrong.
        """
        hf = self.source.config
        model_type = str(hf.get("model_type"))
        config = provider(model_type, "config").Config.from_hf(hf, where=str(self.source.path / CONFIG))
        tensors = provider(model_type, "physical").physical_tensors(config)
        return {name: tensor.shape for name, tensor in tensors.items()}


def open_weights(path: Path, *, source: Path | None = None) -> Weights:
    """Opens a run directory (its newest checkpoint), a checkpoint directory or a Hugging Face directory.

    Args:
        source: for a checkpoint, the Hugging Face directory of its model; by default the one that its run names.

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
        source=HFDirectory(source or _recorded_source(checkpoint)),
        reader=reader,
        shapes={name: reader.shapes[name] for name in parameters},
        dtypes={name: dtype_name(reader.dtypes[name]) for name in parameters},
    )


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run or of its `checkpoints` directory.

    Raises:
        ValueError: there is none.
    """
    for place in (path, path / "checkpoints"):
        if (place / METADATA).is_file():
            return place
        if (place / LATEST).is_file():
            return place / (place / LATEST).read_text().strip()
    raise ValueError(
        f"{path}: neither a Hugging Face directory (no {CONFIG}) nor a checkpoint (no {METADATA}), "
        f"nor a run with one (no checkpoints/{LATEST})"
    )


def _recorded_source(checkpoint: Path) -> Path:
    """The model that the checkpoint's run started from, as its run.json says."""
    run_file = checkpoint.absolute().parent.parent / RUN_FILE
    source = Path(read_json(run_file)["model"]) if run_file.is_file() else None
    if source is None or not source.is_dir():
        raise ValueError(
            f"{checkpoint}: the model it was trained from {f'({source}) ' if source else ''}cannot be found, "
            f"looked in {run_file}; say where config.json and the tokenizer are with --source HF_DIR"
        )
    return source
