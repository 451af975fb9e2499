"""Buckets of tensors in shared memory: how weights travel from a trainer to the workers of an engine.

A bucket is a file in memory (/dev/shm where it exists), named after the process that owns it (`leftovers`). Workers map
it; nothing is pickled or sent through a socket.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from adapters.contract import TensorSpec
from adapters.hf_convert.dtypes import dtype_name
from adapters.hf_convert.manifest import spec_of

from .leftovers import WEIGHTS, memory_directory, owned_name

BUCKET_BYTES = 256 << 20
ALIGNMENT = 64


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A file of tensors. Whoever wrote it removes it; a worker that mapped it keeps its mapping."""

    path: str
    placements: tuple[Placement, ...]

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self.placements)


class BucketStore:
    """The buckets that one process has written. Files that nobody reads any more are written again.

    A file in memory costs more to grow than to fill: its pages are zeroed and mapped one by one. So a publication uses
    the files of the version before the one that is served, and a store holds two versions from the second one on.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[tuple[Path, mmap.mmap]]] = {}
        self._used: dict[Path, mmap.mmap] = {}

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[Bucket, list[TensorSpec]]]:
        """Copies tensors into buckets of about BUCKET_BYTES, in the order they come; a large tensor gets its own.

        Negative zeros are written as zeros: what some CPU kernels serve cannot tell them apart (`readback`).

        Yields:
            Each bucket, and its tensors described as they were written.
        """
        group: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in tensors:
            if group and size + tensor.nbytes > BUCKET_BYTES:
                yield self._write(group)
                group, size = [], 0
            group.append((name, tensor))
            size += _aligned(tensor.nbytes)
        if group:
            yield self._write(group)

    def recycle(self, buckets: Iterable[Bucket]) -> None:
        """Takes back buckets that no worker reads any more; the next `write` may overwrite them."""
        for path in [Path(bucket.path) for bucket in buckets]:
            memory = self._used.pop(path)
            self._spare.setdefault(len(memory), []).append((path, memory))

    def remove(self, buckets: Iterable[Bucket]) -> None:
        """Removes the files. A worker that has mapped one keeps what it holds."""
        for path in [Path(bucket.path) for bucket in buckets]:
            self._used.pop(path, None)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes every file, also those in use. Idempotent."""
        for path in [*self._used, *(path for spares in self._spare.values() for path, _ in spares)]:
            path.unlink(missing_ok=True)
        self._used, self._spare = {}, {}

    def _write(self, group: list[tuple[str, torch.Tensor]]) -> tuple[Bucket, list[TensorSpec]]:
        placements, size = _place(group)
        path, memory = self._take(max(size, 1))
        specs = []
        for place, (name, tensor) in zip(placements, group, strict=True):
            target = _view(memory, place)
            _copy_without_negative_zeros(target, tensor.detach())
            specs.append(spec_of(name, target))
        return Bucket(path=str(path), placements=tuple(placements)), specs

    def _take(self, size: int) -> tuple[Path, mmap.mmap]:
        """A spare file of this size, or a new one."""
        if spares := self._spare.get(size):
            path, memory = spares.pop()
        else:
            path = memory_directory() / owned_name(WEIGHTS)
            memory = _create(path, size)
        self._used[path] = memory
        return path, memory


def map_bucket(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as private views of the shared memory: nothing is copied, writes stay here."""
    with open(bucket.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [(place.name, _view(memory, place)) for place in bucket.placements]


def _view(memory: mmap.mmap, place: Placement) -> torch.Tensor:
    count = math.prod(place.shape)
    flat = torch.frombuffer(memory, dtype=getattr(torch, place.dtype), offset=place.offset, count=count)
    return flat.view(place.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _place(group: list[tuple[str, torch.Tensor]]) -> tuple[list[Placement], int]:
    """Where each tensor goes, and the size of all."""
    placements, offset = [], 0
    for name, tensor in group:
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        placements.append(Placement(name=name, shape=shape, dtype=dtype, offset=offset, num_bytes=tensor.nbytes))
        offset += _aligned(tensor.nbytes)
    return placements, offset


def _create(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # raises now if memory is short; a hole would raise SIGBUS later
        return mmap.mmap(descriptor, size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _copy_without_negative_zeros(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.device.type == "cpu":
        torch.add(source, 0, out=target)  # -0.0 + 0 is 0.0
    else:
        target.copy_(source)
        target.add_(0)
