"""What the driver does when its engine dies or falls silent: a bounded number of restarts, then the run stops.

Repeating is safe. Every sample's seed is derived from its place in the run, so a rollout made again is the same one; a
publication is recognised by its version and digests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from adapters.contract import Engine, EngineDead, EngineTimeout

MAX_RESTARTS = 2
"""For one piece of work: an engine that dies at it a third time will die again."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


def with_restarts(engine: Engine, work: Callable[[], T], *, again: Callable[[], T] | None = None) -> T:
    """Does work that needs the engine. If the engine fails it, restarts the engine and does the work once more.

    Args:
        again: what repeats the work, where the work itself cannot be done twice.

    Raises:
        EngineDead, EngineTimeout: of the last attempt.
    """
    for restarts in range(MAX_RESTARTS + 1):
        try:
            if restarts:
                engine.restart()
            return work() if again is None or not restarts else again()
        except (EngineDead, EngineTimeout) as error:
            if restarts == MAX_RESTARTS:
                raise
            logger.warning("restart %d of at most %d: %s", restarts + 1, MAX_RESTARTS, error)
    raise AssertionError("unreachable")
