"""What a request of the contract is to vLLM: checked, and written as its sampling parameters in plain values.

The values may travel as JSON (`http_engine`): bytes are base64 text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from adapters.contract import GenerationRequest, ScoreRequest, Trace
from adapters.vllm_engine.worker.model_interface import TraceLayout

Parameters = dict[str, Any]
"""Fields of `vllm.SamplingParams`."""


class RequestRules:
    """What one engine accepts."""

    def __init__(
        self,
        *,
        layout: TraceLayout,
        max_model_len: int,
        vocab_size: int,
        policy_problem: Callable[[str], str | None],
    ) -> None:
        """
        Args:
            max_model_len: tokens of the longest sequence.
            policy_problem: what is wrong with an execution policy's text, None if nothing; asked once for each.
        """
        self.layout, self._max_model_len, self._vocab_size = layout, max_model_len, vocab_size
        self._ask_policy = policy_problem
        self._policy_problems: dict[str, str | None] = {}

    def generation(self, request: GenerationRequest) -> Parameters:
        """Raises ValueError if the request cannot run here."""
        self._check_policy(request.execution)
        self._check_tokens(request.prompt_token_ids)
        sampling, trace = request.sampling, request.trace
        extra: dict[str, Any] = {"execution": request.execution}
        if trace is not None:
            self._check_trace(trace, min(len(request.prompt_token_ids), trace.shape[0]))
            extra["trace"] = _text(trace)
        room = self._max_model_len - len(request.prompt_token_ids)
        if sampling.max_tokens > room:
            raise ValueError(
                f"max_tokens: got {sampling.max_tokens} after a prompt of {len(request.prompt_token_ids)} tokens, "
                f"expected at most {room}: the engine's sequences end at {self._max_model_len}"
            )
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "seed": request.effective_seed,
            "logprobs": 0,
            "detokenize": False,
            "extra_args": extra,
        }

    def score(self, request: ScoreRequest) -> Parameters:
        """Of a request whose prompt are all input tokens, `request.token_ids[:-1]`. Raises ValueError."""
        inputs, targets = request.token_ids[:-1], request.token_ids[request.num_prompt_tokens :]
        self._check_tokens(inputs)
        self._check_tokens(targets)
        extra: dict[str, Any] = {
            "first": request.num_prompt_tokens - 1,
            "targets": list(targets),
            "temperature": request.temperature if request.mode == "processed" else 1.0,
        }
        if request.trace is not None:
            self._check_trace(request.trace, len(inputs))
            extra["trace"] = _text(request.trace)
        return {"temperature": 0.0, "max_tokens": 1, "detokenize": False, "extra_args": extra}

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if unknown := [t for t in tokens if not 0 <= t < self._vocab_size]:
            raise ValueError(f"got token ids {unknown[:10]}, expected 0 <= id < {self._vocab_size}")

    def _check_policy(self, text: str | None) -> None:
        if text is None:
            return
        if text not in self._policy_problems:
            self._policy_problems[text] = self._ask_policy(text)
        if problem := self._policy_problems[text]:
            raise ValueError(problem)

    def _check_trace(self, trace: Trace, num_inputs: int) -> None:
        layout = self.layout
        shape = (num_inputs, *layout.row_shape)
        if (trace.kind, trace.shape) != (layout.kind, shape):
            raise ValueError(
                f"got a trace of {trace.kind!r} with shape {trace.shape!r}, expected {layout.kind!r} with {shape}: "
                "one row per input token"
            )
        if outside := [i for i, value in enumerate(trace.data) if not layout.least <= value <= layout.most]:
            raise ValueError(
                f"trace position {outside[0] // layout.row_bytes}: got {trace.data[outside[0]]}, expected "
                f"{layout.least} .. {layout.most}"
            )


def _text(trace: Trace) -> str:
    return base64.b64encode(trace.data).decode()
