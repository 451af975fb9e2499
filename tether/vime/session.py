"""One engine of a rollout process, fed by coroutines.

An engine takes many requests at once, and from one thread only. The framework asks sample by sample. A thread collects
what has been asked, brings the weights up to date, and lets the engine draw all of it; what is asked meanwhile waits
for the next turn.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from adapters.contract import Engine, EngineDead, EngineError, EngineTimeout, GenerationRequest, GenerationResult

logger = logging.getLogger(__name__)
GATHER_SECONDS = 0.05
"""How long a turn waits for requests that come together."""
TRIES = 2
"""How often a request is drawn when the engine is lost under it."""

Asked = tuple[GenerationRequest, "Future[GenerationResult]"]


class Session:
    """Args: `start` makes the engine, `refresh` brings its weights up to date before each turn."""

    def __init__(self, start: Callable[[], Engine], refresh: Callable[[Engine], None]) -> None:
        """Raises what `start` does."""
        self.engine, self._refresh = start(), refresh
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="tether-rollout", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """
        Raises:
            EngineError, ValueError: the engine or its weights failed; it was restarted once where that could help.
        """
        if not self._thread.is_alive():
            raise EngineError("the rollout session is closed")
        future: Future[GenerationResult] = Future()
        self._asked.put((request, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the turn that runs, then the engine. Idempotent."""
        self._asked.put(None)
        self._thread.join(timeout=60)
        self.engine.close()

    def _serve(self) -> None:
        while (first := self._asked.get()) is not None:
            time.sleep(GATHER_SECONDS)
            turn: list[Asked] = [first]
            closing = False
            while not self._asked.empty():
                each = self._asked.get()
                if each is None:
                    closing = True
                    break
                turn.append(each)
            self._draw({request.request_id: (request, future) for request, future in turn})
            if closing:
                break

    def _draw(self, waiting: dict[str, Asked]) -> None:
        """Answers every future of a turn, with a result or with the error that ended it."""
        error: Exception | None = None
        for attempt in range(TRIES):
            try:
                if attempt:
                    self.engine.restart()
                self._refresh(self.engine)
                for result in self.engine.generate([request for request, _ in waiting.values()]):
                    _answer(waiting.pop(result.request_id)[1], result)
                error = EngineError("the engine gave no result")
                break
            except (EngineDead, EngineTimeout) as lost:
                logger.warning("the engine was lost with %d requests: %s", len(waiting), lost)
                error = lost
            except Exception as caught:  # whatever it is, somebody waits for it
                error = caught
                break
        for _, future in waiting.values():
            _answer(future, error)


def _answer(future: Future[GenerationResult], value: GenerationResult | Exception | None) -> None:
    if future.cancelled() or not future.set_running_or_notify_cancel():
        return
    if isinstance(value, GenerationResult):
        future.set_result(value)
    else:
        future.set_exception(value)
