"""What an engine process knows of the keys and values that it passes on or gets: vLLM's side of a handover."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import KVTransferConfig

from adapters.contract import Version
from adapters.vllm_engine.process.messages import Handover
from adapters.vllm_engine.process.nixl_connector import (
    FOR_EVER_SECONDS,
    READERS,
    TRANSFER_SECONDS,
    SchedulerSide,
    TetherNixlConnector,
)
from adapters.vllm_engine.settings import TransferSettings

LET_GO_SECONDS = 10.0
"""Beyond the longest time of a read, for blocks to become free."""
Rpc = Callable[..., list[Any]]


class StaleHandover(RuntimeError):
    """The prompt was computed by other weights than those that are served."""


def transfer_config(settings: TransferSettings) -> KVTransferConfig:
    """vLLM's configuration of our connector."""
    return KVTransferConfig(
        kv_connector=TetherNixlConnector.__name__,
        kv_connector_module_path=TetherNixlConnector.__module__,
        kv_role="kv_producer" if settings.role == "prefill" else "kv_consumer",
        kv_connector_extra_config={
            "kv_lease_duration": FOR_EVER_SECONDS,
            "num_threads": 1,
            TRANSFER_SECONDS: settings.transfer_seconds,
        },
    )


def prefill_params() -> dict[str, Any]:
    """Extra arguments of a request that computes a prompt for others."""
    return {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def reader_params(handover: Handover, readers: int, version: Version) -> dict[str, Any]:
    """Extra arguments of a request that goes on from a handed over prompt. Raises StaleHandover."""
    if handover.version != version:
        raise StaleHandover(f"the prompt was computed by version {handover.version}, {version} is served")
    return {"kv_transfer_params": {**handover.params, READERS: readers}}


class Transfers:
    """Of one engine. Not for use from several threads."""

    def __init__(self, engine: Any, rpc: Rpc, settings: TransferSettings) -> None:
        self._rpc, self._engine, self._seconds = rpc, engine, settings.transfer_seconds
        self._scheduler = engine.engine_core.engine_core.scheduler
        connector = self._scheduler.connector
        assert isinstance(connector, TetherNixlConnector) and isinstance(connector.connector_scheduler, SchedulerSide)
        self._connector = connector.connector_scheduler

    @property
    def engine_id(self) -> str:
        return self._connector.engine_id

    @property
    def num_cache_tokens(self) -> int:
        return self._scheduler.kv_cache_config.num_blocks * self._scheduler.block_size

    @property
    def pending(self) -> bool:
        """Whether vLLM has anything to do: requests, reads, or prompts held for others."""
        return self._scheduler.has_requests()

    @property
    def num_scheduled(self) -> int:
        """Requests that the last step computed."""
        return len(self._scheduler.running)

    def take_arrived(self) -> dict[str, int]:
        arrived, self._connector.arrived = self._connector.arrived, {}
        return arrived

    def release(self, prefill_ids: Sequence[str]) -> None:
        self._rpc("tether_release", list(prefill_ids))

    def forget(self, engine_id: str) -> None:
        self._rpc("tether_forget_peer", engine_id)

    def let_go(self) -> None:
        """Lets go of every held prompt, and waits for reads that were given up: the cache is free of both.

        Raises:
            RuntimeError: something still holds blocks when every read must have ended.
        """
        deadline = time.monotonic() + self._seconds + LET_GO_SECONDS
        while self.pending:
            self.release([r.request_id for r in self._scheduler.requests.values() if r.is_finished()])
            self._engine.engine_core.get_output()
            if time.monotonic() > deadline:
                held = sorted(self._scheduler.requests)
                raise RuntimeError(f"keys and values of {held[:10]} are still held after their deadline")
