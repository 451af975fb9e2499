"""One scheduler step as a model sees it: which token is whose, what each must do, and attention over a subset of them.

Token order is vLLM's: requests in batch order, positions rising. A model that runs some tokens less than others calls
`narrow` to point a plane of attention at the tokens still active, and `write` to hand a token's keys and values to a
plane it did not run in. Both use vLLM's own metadata builder and cache update; attention metadata dictionaries are
new in every step, so nothing is patched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from adapters.vllm_engine.worker.later import Later
from adapters.vllm_engine.worker.records import CacheRows, Records


class Step:
    """Shapes: n tokens scheduled in this step.

    Attributes:
        size: n. The model's inputs may be longer (padding of a captured graph); rows beyond n are nobody's.
        request: [n] index of each token's request in the batch.
        position: [n] position in its sequence.
        slots: [n] row of its request in the worker's records.
        recorded: [n, ...] trace value it must have, the records' `unknown` if it never ran before.

    Args:
        runner: vLLM's, with the step's batch.
        records: an open one for each request of the batch.
        cache_rows: what cached tokens ran, where a prompt's trace is only seen by running it.
    """

    def __init__(self, runner: Any, records: Records, cache_rows: CacheRows | None = None) -> None:
        batch = runner.input_batch
        count = batch.num_reqs
        bounds = runner.query_start_loc.np[: count + 1].astype(np.int64)
        self.size = int(bounds[count])
        self.request = np.repeat(np.arange(count), np.diff(bounds))
        first = batch.num_computed_tokens_cpu[:count].astype(np.int64)
        self.position = np.arange(self.size) - bounds[self.request] + first[self.request]
        self.bounds, self.request_slots = bounds, records.slots(batch.req_ids[:count])
        self.slots = self.request_slots[self.request]
        self._first, self._cache_rows, self._table = first, cache_rows, batch.block_table[0]
        self.recorded = records.recorded(self.slots, self.position)
        self.policies, self.reach = records.policies[self.slots], records.reach[self.slots]
        self._records, self._device = records, runner.device
        self._blocks, self._cache_slots = self._table.get_device_tensor(count), self._table.slot_mapping.gpu
        self._builder = runner.attn_groups[0][0].get_metadata_builder()
        self._narrowed: tuple[int, Any, torch.Tensor] | None = None

    def finish(self, values: np.ndarray | torch.Tensor) -> None:
        """Records the trace value of every token of the step, once.

        Args:
            values: [n, ...] integers that fit a byte, which nobody changes any more. Those on a device are stored when
                it delivers them: nobody waits for them now, but requests that begin behind a prefix of this step.
        """
        later = Later(torch.as_tensor(values))
        if self._cache_rows is not None:
            self._cache_rows.write_later(self._host_cache_slots(self.request, self.position), later)
            self._adopt_prefixes(self._cache_rows)
        self._records.record_later(self.slots, self.position, later)

    def place_handed_over(self, indices: Iterable[int]) -> None:
        """Puts what handed over prompts ran beside their keys and values, which another engine wrote into the cache."""
        assert self._cache_rows is not None or not indices
        for i in indices:
            positions = np.arange(self._first[i])
            slots = np.full(len(positions), self.request_slots[i])
            self._cache_rows.write(  # type: ignore[union-attr]
                self._host_cache_slots(i, positions), self._records.recorded(slots, positions)
            )

    def _adopt_prefixes(self, cache_rows: CacheRows) -> None:
        """Gives requests that begin behind a cached prefix the rows of its tokens.

        After this step's rows were written: vLLM lets a request find blocks that another one fills in the same step.
        """
        ran = self._records.ran[self.request_slots]
        for i in np.flatnonzero(self._first > ran):
            positions = np.arange(ran[i], self._first[i])
            self._records.adopt(self.request_slots[i], cache_rows.read(self._host_cache_slots(i, positions)))

    def _host_cache_slots(self, request: Any, position: np.ndarray) -> np.ndarray:
        """Where tokens lie in the KV cache, computed on the host."""
        size = self._table.block_size
        return self._table.block_table.np[request, position // size].astype(np.int64) * size + position % size

    def index(self, rows: np.ndarray) -> torch.Tensor:
        """Host row numbers as an index on the model's device."""
        return torch.from_numpy(rows).to(self._device, non_blocking=True)

    def narrow(self, planes: Iterable[Any], rows: np.ndarray) -> None:
        """Points the attention layers of a plane at some of the step's tokens. Rows only ever shrink within a step."""
        if self._narrowed is None or self._narrowed[0] != len(rows):
            self._narrowed = len(rows), *self._metadata(rows)
        _, metadata, cache_slots = self._narrowed
        context = get_forward_context()
        for attention in planes:
            context.attn_metadata[attention.layer_name] = metadata
            context.slot_mapping[attention.layer_name] = cache_slots

    def _metadata(self, rows: np.ndarray) -> tuple[Any, torch.Tensor]:
        """Attention rows: one per unbroken run of one request's tokens.

        A run must be unbroken because the kernels place a row's queries at the end of its context: a gap inside would
        let a token see its own future.
        """
        request, position = self.request[rows], self.position[rows]
        starts = np.flatnonzero(np.r_[True, (np.diff(rows) != 1) | (np.diff(request) != 0)])
        bounds = np.r_[starts, len(rows)]
        lengths = position[bounds[1:] - 1] + 1
        bounds_cpu = torch.from_numpy(bounds.astype(np.int32))
        lengths_cpu = torch.from_numpy(lengths.astype(np.int32))
        cache_slots = self._cache_slots[self.index(rows)]
        common = CommonAttentionMetadata(
            query_start_loc=bounds_cpu.to(self._device, non_blocking=True),
            query_start_loc_cpu=bounds_cpu,
            seq_lens=lengths_cpu.to(self._device, non_blocking=True),
            seq_lens_cpu_upper_bound=lengths_cpu,
            num_reqs=len(starts),
            num_actual_tokens=len(rows),
            max_query_len=int(np.diff(bounds).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self._blocks[self.index(request[starts])].contiguous(),
            slot_mapping=cache_slots,
            causal=True,
            positions=self.index(position),
        )
        # Without a plan made on the host: its memory has room for as many rows as there are requests.
        return self._builder.build(0, common, fast_build=True), cache_slots

    def write(self, attention: Any, key: torch.Tensor, value: torch.Tensor, rows: np.ndarray) -> None:
        """Puts keys and values [len(rows), kv_heads * head_dim] of some tokens into a plane, without attention."""
        shape = (-1, attention.num_kv_heads, attention.head_size)
        attention.impl.do_kv_cache_update(
            attention, key.view(shape), value.view(shape), attention.kv_cache, self._cache_slots[self.index(rows)]
        )
