"""What tokens ran arrives from the device later: nobody waits without need, and nothing lands at another's place."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.vllm_engine.worker.records import CacheRows, Records


class Held:
    """A device that delivers when it is told to, or when somebody waits for it."""

    def __init__(self, *values: int | list[int]) -> None:
        self.values, self.is_here, self.waited = np.array(values, np.uint8), False, False

    def get(self) -> np.ndarray:
        self.waited |= not self.is_here
        return self.values


def records(*names: str) -> Records:
    made = Records(policy_width=1)
    for name in names:
        made.open(name, known=np.array([4], np.uint8), capacity=6, reach=4, policy=(0.0,))
    return made


def test_a_decode_step_waits_for_nothing() -> None:
    """The next positions are unknown while the last ones are pending; delivered values are stored in their order."""
    table, first, second = records("a", "b"), Held(2, 3), Held(4, 1)
    slots = table.slots(["a", "b"])
    table.record_later(slots, np.array([1, 1]), first)
    assert (table.recorded(slots, np.array([2, 2])) == 0).all()
    table.record_later(slots, np.array([2, 2]), second)
    second.is_here = True
    assert (table.recorded(slots, np.array([3, 3])) == 0).all() and (table.known[slots] == 1).all()
    first.is_here = True
    assert (table.recorded(slots, np.array([3, 3])) == 0).all() and (table.known[slots] == 3).all()
    assert not first.waited and not second.waited
    assert [table.take(name).trace for name in "ab"] == [bytes([4, 2, 4]), bytes([4, 3, 1])]


def test_a_recomputed_token_waits_for_what_it_ran() -> None:
    table, held = records("a", "b"), Held(2, 3)
    slots = table.slots(["a", "b"])
    table.record_later(slots, np.array([1, 1]), held)
    assert table.recorded(slots[:1], np.array([1])).tolist() == [2] and held.waited


def test_a_pending_token_before_a_known_one_is_waited_for() -> None:
    """The next step's value was known at once; the token before it must still run again as it did."""
    table, held = records("a"), Held(2)
    slots = table.slots(["a"])
    table.record_later(slots, np.array([1]), held)
    table.record(slots, np.array([2]), np.array([4]))
    assert table.recorded(slots[[0, 0]], np.array([1, 2])).tolist() == [2, 4] and held.waited


def test_values_of_a_request_that_is_gone_land_nowhere() -> None:
    """A step that was under way when its request ended: the slot's next owner keeps what it has."""
    table, first, late = records("a"), Held(2), Held(3)
    slots = table.slots(["a"])
    table.record_later(slots, np.array([1]), first)
    table.record_later(slots, np.array([2]), late)
    first.is_here = True
    assert table.take("a").trace == bytes([4, 2])
    table.open("next", known=np.array([4, 4, 4, 4], np.uint8), capacity=6, reach=4, policy=(0.0,))
    assert table.slots(["next"]).tolist() == slots.tolist()
    late.is_here = True
    assert table.recorded(slots, np.array([2])).tolist() == [4]
    assert table.take("next").trace == bytes([4, 4, 4, 4])


def test_what_runs_otherwise_than_recorded_is_still_an_error() -> None:
    table, wrong = records("a"), Held(3)
    slots = table.slots(["a"])
    table.record(slots, np.array([1]), np.array([2]))
    wrong.is_here = True
    differs = pytest.raises(RuntimeError, match="position 1 ran as 3, its record says 2")
    with differs:
        table.record_later(slots, np.array([1]), wrong)
    for act in (lambda: table.recorded(slots, np.array([0])), lambda: table.take("a"), lambda: table.take("a")):
        with differs:  # and whoever goes on is told again, instead of getting rows behind a gap
            act()


def test_a_cached_prefix_waits_for_the_step_that_computes_it() -> None:
    """Two requests of one prompt in one step: the second one begins behind what the first one has not delivered yet."""
    cache = CacheRows(num_slots=1024, row_shape=(2,), unknown=255)
    table = Records(policy_width=1, row_shape=(2,), unknown=255)
    for name in ("first", "second"):
        table.open(name, known=np.zeros((0, 2), np.uint8), capacity=4, reach=0, policy=(0.0,))
    held, (one, two) = Held([1, 2], [3, 4], [5, 6]), table.slots(["first", "second"])
    cache.write_later(np.array([32, 33, 34]), held)
    assert not held.waited
    table.adopt(two, cache.read(np.array([32, 33])))
    assert held.waited
    table.record_later(np.array([one, one, two]), np.array([0, 1, 2]), held)
    held.is_here = True  # as it is when the last token of a request has come
    assert table.take("second").trace == bytes([1, 2, 3, 4, 5, 6]) and table.take("first").trace == bytes([1, 2, 3, 4])


def test_rows_of_a_slot_are_those_written_last() -> None:
    """The values of the slot's last owner, whoever's arrive first."""
    cache, old, new = CacheRows(num_slots=1024, row_shape=(), unknown=255), Held(1, 1, 1), Held(2)
    cache.write_later(np.array([7, 8, 9]), old)
    cache.write_later(np.array([8]), new)
    new.is_here = True
    assert cache.read(np.array([7, 8, 9])).tolist() == [1, 2, 1] and old.waited
    cache.write_later(np.array([9]), Held(3))
    cache.write(np.array([9]), np.array([4]))
    assert cache.read(np.array([9])).tolist() == [4]


def test_a_prefix_found_later_begins_behind_what_is_pending() -> None:
    table, held = records("a"), Held(2)
    slots = table.slots(["a"])
    table.record_later(slots, np.array([1]), held)
    assert table.ran[slots].tolist() == [2] and table.known[slots].tolist() == [1]
    table.adopt(int(slots[0]), np.array([3, 4]))
    assert held.waited and table.take("a").trace == bytes([4, 2, 3, 4])
