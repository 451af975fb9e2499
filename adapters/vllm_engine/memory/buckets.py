"""Buckets: weights travel from a trainer to the workers of an engine in few large pieces of memory that both sides map.

Nothing is pickled and nothing but names, shapes and places goes through a socket. Where the memory lies is a store's
own: `shared_memory` (files in memory) and `device_memory` (the trainer's CUDA memory).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator

import msgspec
import torch

from adapters.contract import TensorSpec
from adapters.hf_convert.digests import copies_without_negative_zeros
from adapters.hf_convert.dtypes import dtype_name

BUCKET_BYTES = 256 << 20
ALIGNMENT = 64


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in a bucket's memory, [bytes] uint8."""
        flat = memory[self.offset : self.offset + self.num_bytes]
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


class SharedFile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A file that processes of this machine can map."""

    path: str


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Memory of a CUDA device that another process may open."""

    device_uuid: str
    handle: tuple[bytes, int, int, bytes, int, bytes, bool]
    """What `torch.UntypedStorage._share_cuda_` returns after the device's index, which each process counts itself."""


Location = SharedFile | DeviceMemory


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Memory full of tensors. Whoever wrote it frees it; a worker that mapped it keeps its mapping."""

    location: Location
    placements: tuple[Placement, ...]

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self.placements)


class BucketStore(abc.ABC):
    """The buckets that one process has written. Memory that nobody reads any more is written again.

    New memory costs more to get than to fill: its pages are zeroed, mapped and registered one by one. So a publication
    uses the memory of the version before the one that is served, and a store holds two versions from the second one on.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[tuple[Location, torch.Tensor]]] = {}
        self._used: dict[Location, torch.Tensor] = {}

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
            group.append((name, tensor.detach()))
            size += _aligned(tensor.nbytes)
        if group:
            yield self._write(group)

    def recycle(self, buckets: Iterable[Bucket]) -> None:
        """Takes back buckets that no worker reads any more; the next `write` may overwrite them."""
        for bucket in buckets:
            memory = self._used.pop(bucket.location)
            self._spare.setdefault(len(memory), []).append((bucket.location, memory))

    def remove(self, buckets: Iterable[Bucket]) -> None:
        """Lets buckets go. A worker that has mapped one keeps what it holds."""
        for bucket in buckets:
            if (memory := self._used.pop(bucket.location, None)) is not None:
                self._delete(bucket.location, memory)

    def close(self) -> None:
        """Lets every bucket go, also those in use. Idempotent."""
        spare = [pair for pairs in self._spare.values() for pair in pairs]
        for location, memory in [*self._used.items(), *spare]:
            self._delete(location, memory)
        self._used, self._spare = {}, {}

    @abc.abstractmethod
    def _create(self, size: int) -> tuple[Location, torch.Tensor]:
        """New memory of `size` bytes, as a uint8 tensor."""

    @abc.abstractmethod
    def _delete(self, location: Location, memory: torch.Tensor) -> None:
        """Frees it."""

    @abc.abstractmethod
    def _written(self, location: Location) -> None:
        """The bucket is full: makes it readable for other processes."""

    def _write(self, group: list[tuple[str, torch.Tensor]]) -> tuple[Bucket, list[TensorSpec]]:
        placements, size = _place(group)
        location, memory = self._take(max(size, 1))
        digests = _write_tensors([tensor for _, tensor in group], placements, memory)
        self._written(location)
        specs = [
            TensorSpec(name=place.name, shape=place.shape, dtype=place.dtype, digest=digest)
            for place, digest in zip(placements, digests, strict=True)
        ]
        return Bucket(location=location, placements=tuple(placements)), specs

    def _take(self, size: int) -> tuple[Location, torch.Tensor]:
        """Spare memory of this size, or new."""
        spares = self._spare.get(size)
        location, memory = spares.pop() if spares else self._create(size)
        self._used[location] = memory
        return location, memory


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


def _write_tensors(sources: list[torch.Tensor], placements: list[Placement], memory: torch.Tensor) -> list[str]:
    """Copies them into a bucket's memory -> digests of what was written, computed on a device if tensors are on one."""
    devices = {source.device for source in sources}
    if len(devices) == 1 and not memory.is_cuda and (device := devices.pop()).type == "cuda":
        staged = torch.empty_like(memory, device=device)  # one copy over the bus
        digests = _write_tensors(sources, placements, staged)
        memory.copy_(staged)
        return digests
    targets = [place.view(memory) for place in placements]
    here = [
        source if source.device == memory.device else target.copy_(source)
        for source, target in zip(sources, targets, strict=True)
    ]
    return copies_without_negative_zeros(list(zip(here, targets, strict=True)))
