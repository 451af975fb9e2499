"""Writes one rank's part of a checkpoint in a thread, from a snapshot, while training goes on.

Megatron-Core plans a save and hands over what to write (an AsyncRequest); its own callers fork processes for the
writing. A fork outlives a trainer that is killed, and still writes; a thread does not, and needs no queue process.
"""

from __future__ import annotations

import inspect
import queue
import threading
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from adapters import threads
from adapters.megatron import checkpoint_files

_WRITE_ARGUMENTS = ["transform_list", "local_proc_idx", "write_bucket", "results_queue", "count_queue", "use_fsync"]


class Writing:
    """A save that is being written.

    Args:
        state: sharded state dict of this rank.
        path: an empty directory, the same on every rank.
        group: data-parallel ranks, which divide the writing of what they all hold.
        metadata: how the state is sharded.
        live_storages: addresses of the memory that training will write to.

    On construction, collective, the save is planned and its tensors are copied; training may change them afterwards.
    """

    def __init__(
        self, state: dict[str, Any], path: Path, *, group: Any, metadata: dict[str, Any], live_storages: set[int]
    ) -> None:
        _keep_results_in_process()
        self._request = dist_checkpointing.save(
            state,
            str(path),
            sharded_strategy=FullyParallelSaveStrategyWrapper(_strategy(), group),
            content_metadata=metadata,
            async_sharded_save=True,
            # From 0.17 on the default asks for another package.
            **_supported(dist_checkpointing.save, async_strategy="mcore"),
        )
        self.facts: dict[str, tuple[int, str]] = {}
        """Sizes and digests of the files that the thread wrote; complete once `join` has returned."""
        self._path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if self._request.async_fn is not None:
            buckets = _snapshot(self._request, live_storages)
            self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint-writer", daemon=True)
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank's files are written and synced, or failed to be. Not collective."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Waits for this rank's files. Not collective.

        Raises:
            OSError and others: what the writing met.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Writes what describes the files of all ranks. Collective; every rank's `join` has returned before."""
        for function in self._request.finalize_fns:
            function()

    def _write(self, buckets: list[Any]) -> None:
        try:
            written = threads.spread(self._write_file, list(enumerate(buckets)), sizes=[_size(b) for b in buckets])
            results = {index: outcome for index, (outcome, _) in enumerate(written)}
            self.facts = {name: fact for _, facts in written for name, fact in facts.items()}
            self._request.async_fn_args[2].put(results)
        except BaseException as error:
            self._error = error

    def _write_file(self, numbered: tuple[int, Any]) -> tuple[Any, dict[str, tuple[int, str]]]:
        """A file, synced; its digest too: reading back is most of what would otherwise hold up training."""
        index, bucket = numbered
        outcome = _write_file(self._request.async_fn.args[0], index, bucket)
        return outcome, checkpoint_files.facts(self._path, [bucket[1]])


def _strategy() -> TorchDistSaveShardedStrategy:
    """Megatron's way to store tensors; one file for each thread that will write."""
    return TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=threads.available())


def _size(bucket: Any) -> int:
    return sum(tensor.nbytes for _, tensor in bucket[2][1])


def _snapshot(request: Any, live_storages: set[int]) -> list[Any]:
    """The request's tensors on the CPU, in memory that training does not write to."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live_storages else tensor

    return [
        (file, key, (data, [(item, own(tensor)) for item, tensor in tensors]))
        for file, key, (data, tensors) in request.preload_fn()
    ]


def _write_file(transforms: list[Any], index: int, bucket: Any) -> Any:
    """One file by Megatron's own writer, synced to disk."""
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[Any] = queue.Queue()
    count.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, count, True)
    _, outcome = results.get_nowait()
    if isinstance(outcome, BaseException):
        raise _cause(outcome, bucket[0])
    return outcome


def _cause(error: BaseException, file: str) -> BaseException:
    """What the operating system said: torch reports a full disk as an inconsistency of its archive."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            return OSError(inner.errno, inner.strerror, file)
        inner = inner.__cause__ or inner.__context__
    return error


def _keep_results_in_process() -> None:
    """Patch: the results of a save go through a queue of this process; checks what `Writing` leans on.

    Megatron-Core (0.16 to 0.19) makes a multiprocessing Manager for them: a process that takes seconds to start, holds
    our standard output and outlives a trainer that is killed. The queue is read where it is filled.
    """
    arguments = list(inspect.signature(FileSystemWriterAsync.write_preloaded_data).parameters)
    if not hasattr(filesystem_async, "_results_queue") or arguments[: len(_WRITE_ARGUMENTS)] != _WRITE_ARGUMENTS:
        raise ImportError(
            "this Megatron-Core writes checkpoints in another way (filesystem_async._results_queue and "
            f"FileSystemWriterAsync.write_preloaded_data{tuple(_WRITE_ARGUMENTS)}); checkpoint_writer has to follow"
        )
    if not isinstance(filesystem_async._results_queue, queue.Queue):
        filesystem_async._results_queue = queue.Queue()


def _supported(function: Any, **options: Any) -> dict[str, Any]:
    """Those options that this Megatron-Core's function takes."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}
