"""What a worker remembers of each request: the trace of its tokens so far, its policy, and scores asked for.

One row of a table per live request, so that a step reads and writes all of its tokens at once, without a loop over
tokens. A position below `known` has run before (a prompt token, a recomputed token, a given trace): it must run again
exactly as recorded. The others are decided by the policy and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
    """A finished request: its trace rows (uint8, row-major) and its scores."""

    trace: bytes
    scores: tuple[float, ...]
    expires: float = field(default_factory=lambda: time.monotonic() + KEEP_SECONDS)


class Records:
    """Live and finished requests of one worker, by vLLM's internal request id."""

    def __init__(self, *, policy_width: int) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._finished: dict[str, Record] = {}
        self._orders: dict[int, ScoreOrder] = {}
        self._scores: dict[int, np.ndarray] = {}
        self._rows = np.zeros((0, 0), np.uint8)
        self.known = np.zeros(0, np.int64)
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
        """Starts a record. `known`: uint8 trace values of the first positions; `capacity`: positions it may reach."""
        slot = self._free.pop() if self._free else len(self._slots)
        self._grow(slot + 1, max(capacity, len(known)))
        self._slots[request_id] = slot
        self._rows[slot, : len(known)] = known
        self.known[slot], self.reach[slot], self.policies[slot] = len(known), reach, policy
        if order is not None:
            self._orders[slot], self._scores[slot] = order, np.full(len(order.targets), np.nan, np.float32)

    def slots(self, request_ids: Sequence[str]) -> np.ndarray:
        """[len(request_ids)] row of each request in the tables."""
        return np.array([self._slots[r] for r in request_ids], np.int64)

    def recorded(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[tokens] the value each token must have, 0 where it never ran before."""
        return np.where(positions < self.known[slots], self._rows[slots, positions], 0).astype(np.int64)

    def record(self, slots: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
        """Stores what ran. Raises RuntimeError if a recorded token ran otherwise, or a position was skipped."""
        recorded = self.recorded(slots, positions)
        if (wrong := np.flatnonzero((recorded > 0) & (recorded != values))).size:
            t = wrong[0]
            raise RuntimeError(f"position {positions[t]} ran as {values[t]}, its record says {recorded[t]}")
        self._rows[slots, positions] = values
        np.maximum.at(self.known, slots, positions + 1)

    def order(self, slot: int) -> ScoreOrder | None:
        return self._orders.get(slot)

    def write_scores(self, slot: int, first: int, values: np.ndarray) -> None:
        self._scores[slot][first : first + len(values)] = values

    def close(self, request_id: str) -> None:
        """The request left the batch for good: its record waits to be taken, and expires."""
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        scores = tuple(self._scores.pop(slot, np.zeros(0, np.float32)).tolist())
        self._orders.pop(slot, None)
        self._finished[request_id] = Record(trace=self._rows[slot, : self.known[slot]].tobytes(), scores=scores)
        self._free.append(slot)
        self._expire()

    def take(self, request_id: str) -> Record | None:
        """The record, once. None if it never ran (aborted while waiting) or expired."""
        self.close(request_id)
        return self._finished.pop(request_id, None)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._finished:
            oldest = next(iter(self._finished))
            if len(self._finished) <= KEEP_REQUESTS and self._finished[oldest].expires > now:
                return
            del self._finished[oldest]

    def _grow(self, num_slots: int, capacity: int) -> None:
        have_slots, have_capacity = self._rows.shape
        if num_slots <= have_slots and capacity <= have_capacity:
            return
        new_slots, new_capacity = max(num_slots, 2 * have_slots), max(capacity, have_capacity)
        grow = ((0, new_slots - have_slots), (0, 0))
        self._rows = np.pad(self._rows, (grow[0], (0, new_capacity - have_capacity)))
        self.known = np.pad(self.known, grow[0])
        self.reach = np.pad(self.reach, grow[0])
        self.policies = np.pad(self.policies, grow)
