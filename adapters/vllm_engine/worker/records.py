"""What a worker remembers of each request: the trace of its tokens so far, its policy, and scores asked for.

One row of a table per live request, so that a step reads and writes all of its tokens at once, without a loop over
tokens. A position below `known` has run before (a prompt token, a recomputed token, a given trace): it must run again
exactly as recorded. The others are decided by the policy and recorded.

A request may begin behind a prefix that another one computed, and which it never runs. What its tokens ran is in
`CacheRows`, beside the slots of the KV cache that hold them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from adapters.vllm_engine.worker.later import Later

KEEP_SECONDS = 600.0
KEEP_REQUESTS = 10_000


@dataclass(frozen=True, kw_only=True)
class ScoreOrder:
    """Which log-probs a request wants: of `targets[i]` after input position `first + i`, at this temperature."""

    first: int
    targets: np.ndarray
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished request: its trace rows (bytes, row-major) and its scores."""

    trace: bytes
    scores: tuple[float, ...]
    expires: float = field(default_factory=lambda: time.monotonic() + KEEP_SECONDS)


class Deliveries:
    """Values that the device has not delivered yet, stored in the order of their steps."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Later, Callable[[np.ndarray], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def put(self, values: Later, store: Callable[[np.ndarray], None]) -> None:
        """Calls `store` with the values once they are here: now, if they are and nothing waits before them."""
        self._queue.append((values, store))
        self.settle(wait=False)

    def settle(self, *, wait: bool) -> None:
        """Stores what is here, step by step, up to the first that is not; or waits for all of it.

        What `store` raises, it raises again at the next call: nothing is stored behind it.
        """
        while self._queue and (wait or self._queue[0][0].is_here):
            values, store = self._queue[0]
            store(values.get())
            self._queue.popleft()  # not before: what could not be stored is an error at every call, not a gap


class Records:
    """Live and finished requests of one worker, by vLLM's internal request id.

    Args:
        policy_width: length of a policy's vector.
        row_shape: shape of one token's trace values.
        unknown: the value of a token that never ran.
    """

    def __init__(self, *, policy_width: int, row_shape: tuple[int, ...] = (), unknown: int = 0) -> None:
        self.unknown, self.row_shape = unknown, row_shape
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._finished: dict[str, Record] = {}
        self._orders: dict[int, ScoreOrder] = {}
        self._scores: dict[int, np.ndarray] = {}
        self._rows = np.zeros((0, 0, *row_shape), np.uint8)
        self._pending = Deliveries()
        self.known = np.zeros(0, np.int64)
        self.ran = np.zeros(0, np.int64)  # as `known`, with values that are pending
        self._owner = np.zeros(0, np.int64)  # counts the requests that had a slot
        self.reach = np.zeros(0, np.int64)
        self.policies = np.zeros((0, policy_width), np.float64)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def __len__(self) -> int:
        return len(self._slots) + len(self._finished)

    def open(
        self,
        request_id: str,
        *,
        known: np.ndarray,
        capacity: int,
        reach: int,
        policy: Sequence[float],
        order: ScoreOrder | None = None,
    ) -> None:
        """Starts a record. `known`: [n, ...] uint8 values of its first positions; `capacity`: how many it may have."""
        slot = self._free.pop() if self._free else len(self._slots)
        self._grow(slot + 1, max(capacity, len(known)))
        self._slots[request_id] = slot
        self._rows[slot, : len(known)] = known
        self.known[slot], self.reach[slot], self.policies[slot] = len(known), reach, policy
        self.ran[slot] = len(known)
        self._owner[slot] += 1
        if order is not None:
            self._orders[slot], self._scores[slot] = order, np.full(len(order.targets), np.nan, np.float32)

    def slots(self, request_ids: Sequence[str]) -> np.ndarray:
        """[len(request_ids)] row of each request in the tables."""
        return np.array([self._slots[r] for r in request_ids], np.int64)

    def recorded(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[tokens, ...] the value each token must have, `unknown` where it never ran before.

        Waits for pending values only if one of these tokens ran in a step whose values are pending. A later step's may
        be known already, so what is missing is asked of the rows.
        """
        self._pending.settle(wait=False)
        values = self._known_values(slots, positions)
        if self._pending and ((positions < self.ran[slots]) & _anywhere(values == self.unknown)).any():
            self._pending.settle(wait=True)
            values = self._known_values(slots, positions)
        return values

    def _known_values(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        ran = (positions < self.known[slots]).reshape(-1, *(1 for _ in self.row_shape))
        return np.where(ran, self._rows[slots, positions], self.unknown).astype(np.int64)

    def adopt(self, slot: int, rows: np.ndarray) -> None:
        """Takes [n, ...] rows of a cached prefix that begins where the record ends.

        Raises:
            RuntimeError: a row is not known: it would reach the trainer as if it had been seen.
        """
        if self.known[slot] < self.ran[slot]:
            self._pending.settle(wait=True)
        first = int(self.known[slot])
        if (missing := np.flatnonzero(_anywhere(rows == self.unknown))).size:
            raise RuntimeError(
                f"position {first + missing[0]} was taken from the prefix cache, but what it ran was never recorded"
            )
        self._rows[slot, first : first + len(rows)] = rows
        self.known[slot] = first + len(rows)
        self.ran[slot] = max(self.ran[slot], self.known[slot])

    def record_later(self, slots: np.ndarray, positions: np.ndarray, values: Later) -> None:
        """Stores what ran, [n, ...], when the device delivers it; for requests that are gone by then, nowhere."""
        np.maximum.at(self.ran, slots, positions + 1)
        owners = self._owner[slots]

        def store(delivered: np.ndarray) -> None:
            same = self._owner[slots] == owners
            self.record(slots[same], positions[same], delivered[same])

        self._pending.put(values, store)

    def record(self, slots: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
        """Stores what ran. Raises RuntimeError if a recorded token ran otherwise."""
        recorded = self._known_values(slots, positions)
        differs = (recorded != self.unknown) & (recorded != values)
        if (wrong := np.flatnonzero(_anywhere(differs))).size:
            t = wrong[0]
            raise RuntimeError(
                f"position {positions[t]} ran as {values[t].tolist()}, its record says {recorded[t].tolist()}"
            )
        self._rows[slots, positions] = values
        np.maximum.at(self.known, slots, positions + 1)
        np.maximum.at(self.ran, slots, positions + 1)

    def order(self, slot: int) -> ScoreOrder | None:
        return self._orders.get(slot)

    def write_scores(self, slot: int, first: int, values: np.ndarray) -> None:
        self._scores[slot][first : first + len(values)] = values

    def close(self, request_id: str) -> None:
        """The request left the batch for good: its record waits to be taken, and expires."""
        self._pending.settle(wait=False)  # what its tokens ran is here, for its last token is
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        self._owner[slot] += 1
        scores = tuple(self._scores.pop(slot, np.zeros(0, np.float32)).tolist())
        self._orders.pop(slot, None)
        self._finished[request_id] = Record(trace=self._rows[slot, : self.known[slot]].tobytes(), scores=scores)
        self._free.append(slot)
        self._expire()

    def take(self, request_id: str) -> Record | None:
        """The record, once. None if it never ran (aborted while waiting) or expired."""
        self.close(request_id)
        return self._finished.pop(request_id, None)

    def find(self, prefix: str) -> str | None:
        """The request whose id is `prefix`, lengthened by vLLM with "-" and eight hexadecimal digits."""
        length = len(prefix) + 9
        held = (request_id for ids in (self._slots, self._finished) for request_id in ids)
        return next((r for r in held if len(r) == length and r.startswith(f"{prefix}-")), None)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._finished:
            oldest = next(iter(self._finished))
            if len(self._finished) <= KEEP_REQUESTS and self._finished[oldest].expires > now:
                return
            del self._finished[oldest]

    def _grow(self, num_slots: int, capacity: int) -> None:
        have_slots, have_capacity = self._rows.shape[:2]
        if num_slots <= have_slots and capacity <= have_capacity:
            return
        new_slots, new_capacity = max(num_slots, 2 * have_slots), max(capacity, have_capacity)
        grow, flat = (0, new_slots - have_slots), ((0, 0),) * len(self.row_shape)
        self._rows = np.pad(self._rows, (grow, (0, new_capacity - have_capacity), *flat), constant_values=self.unknown)
        self.known, self.ran, self._owner = (np.pad(each, grow) for each in (self.known, self.ran, self._owner))
        self.reach = np.pad(self.reach, grow)
        self.policies = np.pad(self.policies, (grow, (0, 0)))


class CacheRows:
    """What the token in each slot of the KV cache ran, for requests that find their prefix in the cache.

    A slot is rewritten whenever its key and value are, so a cached block and its rows always belong together. There is
    a row for every slot from the start: a small part of what the cache itself takes.
    """

    def __init__(self, *, num_slots: int, row_shape: tuple[int, ...], unknown: int) -> None:
        self._rows = np.full((num_slots, *row_shape), unknown, np.uint8)
        self._pending = Deliveries()

    def write(self, cache_slots: np.ndarray, values: np.ndarray) -> None:
        """Stores [tokens, ...] values of the tokens written to these slots."""
        self._pending.settle(wait=True)  # what earlier tokens ran in these slots must not come after
        self._store(cache_slots, values)

    def write_later(self, cache_slots: np.ndarray, values: Later) -> None:
        """As `write`, when the device delivers them."""
        self._pending.put(values, partial(self._store, cache_slots))

    def read(self, cache_slots: np.ndarray) -> np.ndarray:
        """[tokens, ...] values, `unknown` where nothing was ever written. Waits for what is pending."""
        self._pending.settle(wait=True)
        return self._rows[cache_slots]

    def _store(self, cache_slots: np.ndarray, values: np.ndarray) -> None:
        self._rows[cache_slots] = values


def _anywhere(flags: np.ndarray) -> np.ndarray:
    """[tokens] whether any of a token's flags [tokens, ...] is set."""
    return np.asarray(flags.any(axis=tuple(range(1, flags.ndim))))
