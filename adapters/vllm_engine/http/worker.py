"""Our worker in a vLLM server that somebody else started, which names `HttpWorker` as its `--worker-extension-cls`.

The server passes a method's name and text to its workers, and sends back dictionaries; so there is one method.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from adapters.contract import Version
from adapters.hf_convert.directory import HFDirectory
from adapters.vllm_engine.http.messages import (
    ARGUMENTS,
    Attach,
    CheckPolicy,
    Facts,
    GetCounters,
    Message,
    Take,
    WeightStep,
)
from adapters.vllm_engine.process.publication import STARTED
from adapters.vllm_engine.worker import patches
from adapters.vllm_engine.worker.records import Record
from adapters.vllm_engine.worker.worker import TetherWorker


class HttpWorker(TetherWorker):
    """Mixed into vLLM's worker. Remembers what it serves, for clients that come later."""

    def tether_http(self, text: str) -> dict[str, Any]:
        """Answers a message -> {"value": ...}, or {"error": kind, "message": ...} for what the client did wrong."""
        message = msgspec.json.decode(text, type=Message)
        try:
            value = self._tether_answer(message)
        except ValueError as error:
            return {"error": "ValueError", "message": str(error)}
        return {"value": msgspec.to_builtins(value)}

    def _tether_answer(self, message: Message) -> Any:
        if isinstance(message, Attach):
            return self._tether_attach(message)
        if isinstance(message, CheckPolicy):
            return self.tether_check_policy(message.text)
        if isinstance(message, Take):
            return [self._tether_taken(request_id) for request_id in message.request_ids]
        if isinstance(message, GetCounters):
            return self.tether_counters()
        return self._tether_weight_step(message)

    def _tether_attach(self, message: Attach) -> Facts:
        if not hasattr(self, "tether_weights"):
            self.tether_install(message.execution, "host")
            self._tether_served: tuple[Version, str | None] = (STARTED, None)
            self._tether_offered: tuple[Version, str | None] | None = None
        elif self._tether_offered is not None:  # a client went away between commit and settle
            self._tether_step("rollback", self._tether_offered[0])
        self._tether_default = self.model_runner.get_model().parse_policy(message.execution)
        self.tether_weights.discard()
        layout, config = self.model_runner.get_model().trace_layout, self.vllm_config.model_config  # type: ignore[attr-defined]
        version, manifest = self._tether_served
        return Facts(
            layout=layout,
            tensors={name: tuple(info.shape) for name, info in HFDirectory(Path(config.model)).tensors.items()},
            dtype=str(config.dtype).removeprefix("torch."),
            max_model_len=config.max_model_len,
            vocab_size=config.get_vocab_size(),
            pid=os.getpid(),
            version=version,
            manifest_digest=manifest,
            problems=tuple(self._tether_problems()),
        )

    def _tether_problems(self) -> list[str]:
        config = self.vllm_config  # type: ignore[attr-defined]
        wanted = {
            "--logprobs-mode processed_logprobs": config.model_config.logprobs_mode == "processed_logprobs",
            "--enforce-eager": config.model_config.enforce_eager,
            "--no-async-scheduling": not config.scheduler_config.async_scheduling,
            "--generation-config vllm": config.model_config.generation_config == "vllm",
            "VLLM_PLUGINS=tether in the environment": patches.applied(),
        }
        return [option for option, given in wanted.items() if not given]

    def _tether_taken(self, request_id: str) -> Record | None:
        """The record of a request by the client's id, which vLLM lengthened."""
        internal_id = self.tether_records.find(request_id)
        return None if internal_id is None else self.tether_records.take(internal_id)

    def _tether_weight_step(self, message: WeightStep) -> Any:
        if message.method not in ARGUMENTS:
            raise ValueError(f"weights: got method {message.method!r}, expected one of {sorted(ARGUMENTS)}")
        kind = ARGUMENTS[message.method]
        arguments = () if kind is None else (msgspec.json.decode(message.argument, type=kind),)
        return self._tether_step(message.method, *arguments)

    def _tether_step(self, method: str, *arguments: Any) -> Any:
        """One step of the transaction, and what it means for a client that attaches later."""
        if method == "prepare":
            self._tether_prepared: str = arguments[0].digest
        if method == "commit":
            self._tether_offered = arguments[0], self._tether_prepared
        value = getattr(self.tether_weights, method)(*arguments)
        if method == "settle" and self._tether_offered is not None:
            self._tether_served = self._tether_offered
        if method in ("settle", "rollback"):
            self._tether_offered = None
        return value
