"""Buckets in files in memory (/dev/shm where it exists), named after the process that owns them (`leftovers`).

A process that uses CUDA registers what it maps, so that copies to and from its device run at the bus's speed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from adapters.vllm_engine.memory.buckets import Bucket, BucketStore, Location, SharedFile
from adapters.vllm_engine.memory.leftovers import WEIGHTS, memory_directory, owned_name


class SharedFileStore(BucketStore):
    """Buckets in shared memory of the host, or in a directory that other hosts see too."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__()
        self._directory = directory

    def recycle(self, buckets: Iterable[Bucket]) -> None:
        """In a directory of its own, files are not written again: another host may hold pages of what they were."""
        if self._directory is None:
            super().recycle(buckets)
        else:
            self.remove(buckets)

    def _written(self, location: Location) -> None:
        if self._directory is not None:
            assert isinstance(location, SharedFile)
            with open(location.path, "rb") as file:
                os.fsync(file.fileno())

    def _create(self, size: int) -> tuple[Location, torch.Tensor]:
        path = (self._directory or memory_directory()) / owned_name(WEIGHTS)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # raises now if memory is short; a hole would raise SIGBUS later
            memory = _map(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return SharedFile(path=str(path)), memory

    def _delete(self, location: Location, memory: torch.Tensor) -> None:
        assert isinstance(location, SharedFile)
        unmap(memory)
        Path(location.path).unlink(missing_ok=True)


def map_file(location: SharedFile) -> torch.Tensor:
    """The whole file as uint8. Raises FileNotFoundError: its owner has removed it."""
    descriptor = os.open(location.path, os.O_RDWR)
    try:
        return _map(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def unmap(memory: torch.Tensor) -> None:
    """Ends a mapping's registration with CUDA. Its pages go when the last tensor in it does."""
    if memory.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _map(descriptor: int, size: int) -> torch.Tensor:
    memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # A limit on locked memory may forbid it; copies are slower then, and the same.
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
    return memory
