"""A request on its way to a vLLM server, and what becomes of it."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from adapters.contract import GenerationRequest, ScoreRequest, Version
from adapters.vllm_engine.process.outcomes import Running, outcome
from adapters.vllm_engine.worker.model_interface import TraceLayout
from adapters.vllm_engine.worker.records import Record


class Sent:
    """A request on its way."""

    def __init__(
        self,
        request: GenerationRequest | ScoreRequest,
        sent_id: str,
        version: Version,
        future: concurrent.futures.Future[Any],
    ) -> None:
        self.request, self.sent_id, self.version, self.future = request, sent_id, version, future

    def answer(self) -> Any:
        """The server's answer, or the ValueError by which it refused. Raises what `Server.post` raises otherwise."""
        if self.future.cancelled():
            return {"token_ids": [], "finish_reason": "abort"}
        try:
            return self.future.result()["choices"][0]
        except ValueError as error:
            return error

    def outcome(self, choice: dict[str, Any], record: Record | None, layout: TraceLayout) -> Any:
        """The result, from the server's answer and the worker's record."""
        running = Running(self.request, self.sent_id, None)
        running.token_ids = list(choice["token_ids"] or ())
        if isinstance(self.request, GenerationRequest) and running.token_ids:
            running.logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return outcome(running, record, choice["finish_reason"], self.version, layout)
