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


def write_buckets(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[Bucket, list[TensorSpec]]]:
    """Copies tensors into buckets of about BUCKET_BYTES, in the order they come; a large tensor gets its own.

    Negative zeros are written as zeros: what CPU kernels serve cannot tell them apart (`readback`).

    Yields:
        Each bucket, and its tensors described as they were written.
    """
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > BUCKET_BYTES:
            yield _write(group)
            group, size = [], 0
        group.append((name, tensor))
        size += _aligned(tensor.nbytes)
    if group:
        yield _write(group)


def remove_buckets(buckets: Iterable[Bucket]) -> None:
    """Removes the files."""
    for bucket in buckets:
        Path(bucket.path).unlink(missing_ok=True)


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


def _write(group: list[tuple[str, torch.Tensor]]) -> tuple[Bucket, list[TensorSpec]]:
    placements, offset = [], 0
    for name, tensor in group:
        placements.append(
            Placement(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                offset=offset,
                num_bytes=tensor.nbytes,
            )
        )
        offset += _aligned(tensor.nbytes)
    path = memory_directory() / owned_name(WEIGHTS)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(offset, 1))
        memory = mmap.mmap(descriptor, max(offset, 1))
        specs = []
        for place, (name, tensor) in zip(placements, group, strict=True):
            target = _view(memory, place)
            _copy_without_negative_zeros(target, tensor.detach())
            specs.append(spec_of(name, target))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return Bucket(path=str(path), placements=tuple(placements)), specs


def _copy_without_negative_zeros(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.device.type == "cpu":
        torch.add(source, 0, out=target)  # -0.0 + 0 is 0.0
    else:
        target.copy_(source)
        target.add_(0)
