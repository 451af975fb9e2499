"""What a trainer process does once: its objects of the start leave the garbage collector's sight."""

from __future__ import annotations

import gc
import weakref

from adapters.megatron.runtime import freeze_objects


class Cycle:
    """Something that refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_frozen_objects_are_those_of_the_start() -> None:
    """Garbage goes first, what is there leaves the collector's sight, and later cycles are still collected."""
    gc.disable()  # the garbage below must be there until it is asked to go
    try:
        kept, before = Cycle(), weakref.ref(Cycle())
        assert before() is not None and any(each is kept for each in gc.get_objects())
        count = freeze_objects()
        assert 0 < gc.get_freeze_count() <= count  # a frozen object that nobody refers to any more is gone
        assert before() is None and not any(each is kept for each in gc.get_objects())
        after = weakref.ref(Cycle())
        assert gc.collect() and after() is None
    finally:
        gc.unfreeze()  # this process builds many trainers
        gc.enable()
