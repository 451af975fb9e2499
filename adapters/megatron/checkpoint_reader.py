"""Reads the tensors of a Megatron torch_dist checkpoint in one plain process: no process groups, no model, no Megatron.

A parameter's key is its Hugging Face name and has one global shape, whatever parallel layout wrote it, so reading is by
name. Optimizer state lies under longer keys beside them and is never touched. The checkpoint's metadata is a pickle:
read checkpoints you trust.

torch's own loader fills tensors that exist already, so that each is in memory twice; here a tensor that was stored in
one piece is handed over as it was read.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

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
        if not (path / METADATA).is_file():
            raise ValueError(f"{path}: no complete checkpoint (no {METADATA}); expected a directory iter_NNNNNNN")
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._places = metadata.storage_data
        stored = metadata.state_dict_metadata
        self._stored = {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        self.shapes: dict[str, tuple[int, ...]] = {key: tuple(entry.size) for key, entry in self._stored.items()}
        self.dtypes: dict[str, torch.dtype] = {key: entry.properties.dtype for key, entry in self._stored.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors on the CPU, in the order of `names`, one in memory at a time.

        A tensor that several ranks wrote takes the space of its largest part besides.

        Raises:
            ValueError: a name is not stored, or a file of the checkpoint is missing or damaged.
        """
        for name in names:
            if name not in self.shapes:
                raise ValueError(f"{self.path}: no tensor {name!r} among the {len(self.shapes)} of this checkpoint")
            yield name, self._whole(name)

    def _whole(self, name: str) -> torch.Tensor:
        chunks = self._stored[name].chunks
        if len(chunks) == 1 and tuple(chunks[0].sizes) == self.shapes[name]:
            return self._chunk(name, chunks[0])
        covered = sum(torch.Size(chunk.sizes).numel() for chunk in chunks)
        if covered != torch.Size(self.shapes[name]).numel():
            raise ValueError(f"{self.path}: damaged checkpoint, {name!r} is not whole in it")
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        for chunk in chunks:
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = self._chunk(name, chunk)
        return whole

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        try:
            place = self._places[MetadataIndex(name, chunk.offsets)]
            with (self.path / place.relative_path).open("rb") as file:
                part = torch.load(self._reader._slice_file(file, place), map_location="cpu", weights_only=True)
        except (KeyError, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.path}: damaged checkpoint, {name!r} cannot be read ({problem})") from error
        if tuple(part.shape) != tuple(chunk.sizes):
            raise ValueError(f"{self.path}: damaged checkpoint, a part of {name!r} has shape {tuple(part.shape)}")
        return part
