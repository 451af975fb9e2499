"""vLLM's NIXL connector with what its owner needs: many readers of a prefill, deadlines, bytes by request, any port.

vLLM loads it by name (`kv_connector_module_path`). A decode worker reads (pulls) the blocks of a prompt from
the prefill worker that computed them; that one keeps them until every reader said that it has them, or until
its client lets go of them. There is no lease that runs out: blocks that expire while a reader waits for a place
in the batch are reused under it, and it decodes on another prompt's keys.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from adapters.vllm_engine.worker import patches

FOR_EVER_SECONDS = 1_000_000_000
READERS = "tether_readers"
"""Key in a decode request's transfer parameters: how many requests read this prefill."""
TRANSFER_SECONDS = "tether_transfer_seconds"
"""Key in the connector's extra configuration: longest time that a read may take."""


@dataclass
class Arrivals(KVConnectorWorkerMetadata):
    """Bytes that arrived for each request whose read is complete, summed over workers."""

    num_bytes: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Arrivals:
        assert isinstance(other, Arrivals)
        both = self.num_bytes.keys() | other.num_bytes.keys()
        return Arrivals({r: self.num_bytes.get(r, 0) + other.num_bytes.get(r, 0) for r in both})


class TetherNixlConnector(NixlPullConnector):
    """What vLLM instantiates, once in the scheduler and once in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SchedulerSide(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = WorkerSide(vllm_config, self.engine_id, kv_cache_config)

    def build_connector_worker_meta(self) -> Arrivals | None:
        assert isinstance(self.connector_worker, WorkerSide)
        return self.connector_worker.take_arrivals()


class SchedulerSide(NixlPullConnectorScheduler):
    """
    Attributes:
        arrived: bytes by request whose keys and values have arrived; its reader takes them out.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        patches.expect_parameters(
            NixlPullConnectorScheduler._nixl_handshake_listener,
            ["encoded_data", "ready_event", "stop_event", "host", "port"],
        )
        self.arrived: dict[str, int] = {}
        self._readers: dict[str, int] = {}
        self._moved: dict[str, int] = {}
        self._listening: BaseException | None = None

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            self._readers[request.request_id] = params[READERS]

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, NixlConnectorMetadata)
        meta.readers = {r: self._readers.pop(r) for r in meta.reqs_to_recv}
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        for request_id, num_bytes in meta.num_bytes.items() if isinstance(meta, Arrivals) else ():
            self._moved[request_id] = self._moved.get(request_id, 0) + num_bytes
        for request_id in connector_output.finished_recving or ():  # on every worker; workers may end in other steps
            self.arrived[request_id] = self._moved.pop(request_id, 0)

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata(metadata)  # returns when the listener has set its event
        if self._listening is not None:
            raise RuntimeError(f"no port on {self.side_channel_host} for handshakes") from self._listening

    def _nixl_handshake_listener(
        self,
        encoded_data: dict[tuple[int, int], bytes],
        ready_event: threading.Event,
        stop_event: threading.Event,
        host: str,
        port: int,
    ) -> None:
        """Answers requests for this engine's agents, on a port that the system chooses.

        vLLM's own takes a given port, and if that is in use the engine waits for ever.
        """
        try:
            socket = zmq.Context.instance().socket(zmq.ROUTER)
            self.side_channel_port = socket.bind_to_random_port(f"tcp://{host}")
        except BaseException as error:
            self._listening = error
            return
        finally:
            ready_event.set()
        while not stop_event.is_set():
            if not socket.poll(500):
                continue
            identity, empty, question = socket.recv_multipart()
            _, pipeline_rank, tensor_rank = msgspec.msgpack.decode(question)
            clock = msgspec.msgpack.encode(time.perf_counter())  # the reader estimates the offset of our clock
            socket.send_multipart((identity, empty, encoded_data[pipeline_rank, tensor_rank], clock))
        socket.close(linger=0)


class WorkerSide(NixlPullConnectorWorker):
    """Reads as vLLM does; counts bytes by request, ends reads at their deadline, and lets go when told to."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        for method, names in (
            ("_read_blocks", ["self", "read_spec", "dst_engine_id", "request_id"]),
            ("_pop_done_transfers", ["self", "transfers"]),
            ("_handle_failed_transfer", ["self", "req_id", "handle", "failed_req_ids"]),
            ("_cleanup_remote_engine", ["self", "engine_id"]),
        ):
            patches.expect_parameters(getattr(NixlPullConnectorWorker, method), names)
        patches.rest_between_progress()
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        os.sched_setaffinity(0, cores)  # vLLM bound this thread, which runs the model, to the last core of its node
        self._seconds = float(vllm_config.kv_transfer_config.get_from_extra_config(TRANSFER_SECONDS, 60.0))
        self._readers: dict[str, int] = {}
        self._deadlines: dict[str, float] = {}
        self._moved: dict[str, int] = {}
        self._arrivals: dict[str, int] = {}
        self._released: set[str] = set()
        self._forgotten: set[str] = set()

    def release(self, request_ids: Iterable[str]) -> None:
        """Lets go of finished prefills, whoever has not read them. Unknown ones are ignored."""
        self._released.update(request_ids)

    def forget(self, engine_id: str) -> None:
        """Drops what is known of another engine, which has ended, as soon as nothing uses it."""
        self._forgotten.add(engine_id)

    def take_arrivals(self) -> Arrivals | None:
        arrivals, self._arrivals = self._arrivals, {}
        return Arrivals(arrivals) if arrivals else None

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        self._readers.update(metadata.readers)
        for request_id, meta in metadata.reqs_to_recv.items():
            if meta.awaiting_kvs:
                self._deadlines[request_id] = time.monotonic() + self._seconds
        super().start_load_kv(metadata)

    def _read_blocks(self, *, request_id: str, expected_consumers: int, **others: Any) -> bool:
        """A prefill counts the reads that it was told to expect: those of all requests that share it."""
        expected = expected_consumers * self._readers.get(request_id, 1)
        return super()._read_blocks(request_id=request_id, expected_consumers=expected, **others)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        super()._read_blocks_for_req(req_id, meta)
        if not meta.awaiting_kvs and meta.remote is not None and meta.remote.engine_id in self._remote_agents:
            self._readers.pop(req_id, None)  # it was only a notice, and has been sent

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()
        for request_id in list(transfers):
            one = {request_id: transfers.pop(request_id)}
            counted = len(self.xfer_stats.data["bytes_transferred"])
            finished, broken = super()._pop_done_transfers(one)
            moved = int(sum(self.xfer_stats.data["bytes_transferred"][counted:]))
            self._moved[request_id] = self._moved.get(request_id, 0) + moved
            done |= finished
            failed |= broken
            transfers.update(one)
            if one and time.monotonic() > self._deadlines.get(request_id, float("inf")):
                failed |= self._give_up(request_id, transfers)
                done |= {request_id} - transfers.keys()
        return done, failed

    def _give_up(self, request_id: str, transfers: dict[str, list[int]]) -> set[str]:
        """Ends a read that takes too long. Raises if it cannot be ended: memory may still be written into."""
        failed: set[str] = set()
        for handle in transfers[request_id]:
            if not self._handle_failed_transfer(request_id, handle, failed):
                raise RuntimeError(
                    f"request {request_id!r}: keys and values did not arrive in {self._seconds:.0f} s, and the read "
                    "cannot be taken back: its blocks cannot be used again"
                )
        del transfers[request_id]
        return failed

    def get_transfer_results(self) -> Any:
        for request_id in list(self._released):
            if request_id in self._reqs_to_send:
                self._reqs_to_send[request_id] = 0.0
            elif request_id in self._reqs_to_process:
                continue  # it has finished, and the next step will say so
            self._released.remove(request_id)
        results = super().get_transfer_results()
        for request_id in results.finished_recving:
            self._deadlines.pop(request_id, None)
            self._readers.pop(request_id, None)
            moved = self._moved.pop(request_id, 0)
            if request_id not in results.failed_recving:
                self._arrivals[request_id] = moved
        self._forget_engines()
        return results

    def _forget_engines(self) -> None:
        with self._handshake_lock:
            if self._handshake_futures:  # one of them may be with an engine to forget
                return
        busy = {meta.remote.engine_id for meta in self._recving_metadata.values() if meta.remote is not None}
        for engine_id in self._forgotten - busy:
            self._forgotten.remove(engine_id)
            if engine_id in self._remote_agents:
                self._cleanup_remote_engine(engine_id)
