"""What several trainer processes do together: rank 0 owns the engine, the data and the files; the others follow.

Every collective here ends within the process group's timeout. Work that can fail on rank 0 goes through
`from_rank_zero`, which carries its error to all ranks; otherwise the others would wait for a broadcast until timeout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from adapters.contract import EngineError

T = TypeVar("T")


def rank() -> int:
    """This process's rank, before and after it joins a process group."""
    return int(os.environ.get("RANK", 0))


def on_any_rank(holds: bool) -> bool:
    """Whether something holds on some rank: the same answer on every one. All ranks must call this together."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return holds
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, holds)
    return any(answers)


def from_rank_zero(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and gives every rank its result. All ranks must call this together.

    Raises:
        Exception: on rank 0, whatever `work` raised.
        RuntimeError: on the others, with the text of rank 0's error; an EngineError if rank 0's is one.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return work()
    if dist.get_rank() == 0:
        return _run_and_tell(work)
    box: list = [None]
    dist.broadcast_object_list(box, src=0)
    result, problem, is_engines = box[0]
    if problem is not None:
        raise (EngineError if is_engines else RuntimeError)(f"rank 0 failed: {problem}")
    return result


def _run_and_tell(work: Callable[[], T]) -> T:
    try:
        result = work()
    except BaseException as error:
        is_engines = isinstance(error, EngineError)
        dist.broadcast_object_list([(None, f"{type(error).__name__}: {error}", is_engines)], src=0)
        raise
    dist.broadcast_object_list([(result, None, False)], src=0)
    return result
