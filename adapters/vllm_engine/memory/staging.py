"""Where a published version waits until it is committed, on the client's side and on the worker's.

| staging  | trainer to worker            | memory beside the served weights, from the second publication on          |
|----------|------------------------------|---------------------------------------------------------------------------|
| `host`   | shared memory of the host    | two versions on the host                                                  |
| `shadow` | the same, copied to the device when staged | two versions on the host; one on the device while publishing |
| `ipc`    | the trainer's device memory  | two versions on the device, in the trainer's process                      |
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from adapters.vllm_engine.memory import device_memory, shared_memory
from adapters.vllm_engine.memory.buckets import Bucket, BucketStore, Location, Placement, SharedFile

Staging = Literal["host", "shadow", "ipc"]


def store_for(staging: Staging) -> BucketStore:
    """The client's side.

    Raises:
        ValueError: no such staging, or it needs CUDA and there is none.
    """
    if staging not in get_args(Staging):
        raise ValueError(f"staging: got {staging!r}, expected one of {get_args(Staging)}")
    if staging != "host" and not torch.cuda.is_available():
        raise ValueError(f"staging: got {staging!r} on a machine without CUDA, expected 'host'")
    return device_memory.DeviceStore() if staging == "ipc" else shared_memory.SharedFileStore()


class Mapped:
    """What one worker has mapped. A bucket that is written again is not mapped again."""

    ROUNDS = 2
    """A mapping unused for more publications than this is let go: buckets come back every second time."""

    def __init__(self) -> None:
        self._memory: dict[Location, torch.Tensor] = {}
        self._views: dict[Location, tuple[tuple[Placement, ...], list[tuple[str, torch.Tensor]]]] = {}
        self._used: dict[Location, int] = {}
        self._round = 0

    def tensors(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """Views of the bucket's memory; not to be written to."""
        location = bucket.location
        if location not in self._memory:
            self._memory[location] = _map(location)
        self._used[location] = self._round
        if location not in self._views or self._views[location][0] != bucket.placements:
            views = [(place.name, place.view(self._memory[location])) for place in bucket.placements]
            self._views[location] = bucket.placements, views
        return self._views[location][1]

    def end_round(self) -> None:
        """A publication ended, whichever way. Lets old mappings go; tensors in them stay valid."""
        self._round += 1
        for location in [loc for loc, used in self._used.items() if self._round - used > self.ROUNDS]:
            del self._used[location]
            self._views.pop(location, None)
            memory = self._memory.pop(location)
            if isinstance(location, SharedFile):
                shared_memory.unmap(memory)


def _map(location: Location) -> torch.Tensor:
    return shared_memory.map_file(location) if isinstance(location, SharedFile) else device_memory.open_memory(location)
