"""Buckets: weights travel from a trainer to the workers of an engine in few large pieces of memory that both sides map.

Nothing is pickled and nothing but names, shapes and places goes through a socket. Where the memory lies is a store's
own: `shared_memory` (files in memory) and `device_memory` (the trainer's CUDA memory).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
import torch

from adapters.contract import TensorSpec
from adapters.hf_convert.digests import begin_copies
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


class _Started(NamedTuple):
    """A bucket that is being written."""

    bucket: Bucket
    digests: Callable[[], list[str]]
    """Waits for the writing."""


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
        started: _Started | None = None
        try:
            for group in _groups(tensors):
                ended, started = started, self._start(group)  # a device copies one while the next is begun
                if ended is not None:
                    yield self._finish(ended)
            if started is not None:
                yield self._finish(started)
        except BaseException:
            if started is not None:
                with contextlib.suppress(Exception):
                    started.digests()  # a device may still be writing
                self.remove([started.bucket])
            raise

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
        """The bucket is full: makes it readable for other hosts, where it is meant to be."""

    def _start(self, group: list[tuple[str, torch.Tensor]]) -> _Started:
        placements, size = _place(group)
        location, memory = self._take(max(size, 1))
        bucket = Bucket(location=location, placements=tuple(placements))
        return _Started(bucket, _begin_writing([tensor for _, tensor in group], placements, memory))

    def _finish(self, started: _Started) -> tuple[Bucket, list[TensorSpec]]:
        bucket = started.bucket
        specs = [
            TensorSpec(name=place.name, shape=place.shape, dtype=place.dtype, digest=digest)
            for place, digest in zip(bucket.placements, started.digests(), strict=True)
        ]
        self._written(bucket.location)
        return bucket, specs

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


def _groups(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > BUCKET_BYTES:
            yield group
            group, size = [], 0
        group.append((name, tensor.detach()))
        size += _aligned(tensor.nbytes)
    if group:
        yield group


def _begin_writing(
    sources: list[torch.Tensor], placements: list[Placement], memory: torch.Tensor
) -> Callable[[], list[str]]:
    """Copies them into a bucket's memory; what it returns waits for that and gives the digests of what was written.

    They are computed on a device if the tensors are on one.
    """
    devices = {source.device for source in sources}
    is_from_device = len(devices) == 1 and sources[0].is_cuda
    written = memory if memory.is_cuda or not is_from_device else torch.empty_like(memory, device=sources[0].device)
    targets = [place.view(written) for place in placements]
    here = [
        source if source.device == written.device else target.copy_(source)
        for source, target in zip(sources, targets, strict=True)
    ]
    digests = begin_copies(list(zip(here, targets, strict=True)))
    if written is not memory:
        memory.copy_(written, non_blocking=True)  # once over the bus
    if not written.is_cuda:
        return digests
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(written.device))

    def end() -> list[str]:
        done.synchronize()
        return digests()

    return end
