"""Reads the tensors of a Megatron torch_dist checkpoint in one plain process: no process groups, no model, no Megatron.

A parameter's key is its Hugging Face name and has one global shape, whatever parallel layout wrote it, so reading is by
name. Optimizer state lies under longer keys beside them and is never touched. The checkpoint's metadata is a pickle:
read checkpoints you trust.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"


class CheckpointReader:
    """One checkpoint directory (`iter_NNNNNNN`), opened.

    Attributes:
        shapes: global shape of every stored tensor by key.
        dtypes: its dtype.

    Raises:
        ValueError: the directory holds no complete torch_dist checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._storage = _Storage(path)
        stored = self._storage.read_metadata().state_dict_metadata
        tensors = {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        self.shapes: dict[str, tuple[int, ...]] = {key: tuple(entry.size) for key, entry in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {key: entry.properties.dtype for key, entry in tensors.items()}

    def read(self, names: Iterable[str], *, batch_bytes: int = 1 << 28) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors on the CPU, in the order of `names`, a batch of at most `batch_bytes` at a time.

        A larger tensor is a batch of its own.

        Raises:
            ValueError: a name is not stored, or a file of the checkpoint is missing or damaged.
        """
        batch: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in self.shapes:
                raise ValueError(f"{self.path}: no tensor {name!r} among the {len(self.shapes)} of this checkpoint")
            tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
            if batch and sum(t.nbytes for t in (*batch.values(), tensor)) > batch_bytes:
                yield from self._fill(batch)
            batch[name] = tensor
        yield from self._fill(batch)

    def _fill(self, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads the batch's tensors in place and hands them over, leaving the batch empty."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
                checkpoint.load(batch, storage_reader=self._storage, no_dist=True)
        except CheckpointException as error:
            reasons = "; ".join(f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values())
            raise ValueError(f"{self.path}: damaged checkpoint, its tensors cannot be read ({reasons})") from error
        for name in list(batch):
            yield name, batch.pop(name)


class _Storage(FileSystemReader):
    """torch's reader, which would otherwise unpickle the metadata of the whole checkpoint for every batch."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not (path / METADATA).is_file():
            raise ValueError(f"{path}: no complete checkpoint (no {METADATA}); expected a directory iter_NNNNNNN")
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata
