"""Buckets in CUDA memory of the trainer, opened by workers on the same device: no byte leaves it."""

from __future__ import annotations

import torch

from adapters.vllm_engine.memory.buckets import BucketStore, DeviceMemory, Location


class DeviceStore(BucketStore):
    """Buckets on this process's current CUDA device."""

    def _create(self, size: int) -> tuple[Location, torch.Tensor]:
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        _, *handle = memory.untyped_storage()._share_cuda_()
        return DeviceMemory(device_uuid=_uuid(memory.device.index), handle=tuple(handle)), memory

    def _written(self, location: Location) -> None:
        pass  # the device finished it before its digests were known

    def _delete(self, location: Location, memory: torch.Tensor) -> None:
        pass  # goes with its last reference, once no worker has it open


def open_memory(location: DeviceMemory) -> torch.Tensor:
    """The memory as uint8, on this process's own number of that device.

    Raises:
        RuntimeError: this process does not see the device.
    """
    devices = {_uuid(index): index for index in range(torch.cuda.device_count())}
    if location.device_uuid not in devices:
        raise RuntimeError(
            f"staging 'ipc': got memory of device {location.device_uuid}, this worker sees {sorted(devices)}; "
            "let trainer and engine share a device, or stage through 'host'"
        )
    storage = torch.UntypedStorage._new_shared_cuda(devices[location.device_uuid], *location.handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
