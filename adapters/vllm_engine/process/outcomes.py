"""What becomes of a request inside an engine process: tokens so far, and the result, handover or loss it ends as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.contract import GenerationRequest, GenerationResult, ScoreRequest, ScoreResult, Trace, Version
from adapters.vllm_engine.process.messages import Handover, Lost, Prefilled
from adapters.vllm_engine.worker.model_interface import TraceLayout
from adapters.vllm_engine.worker.records import Record

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

Outcome = GenerationResult | ScoreResult | Prefilled | Lost


class Running:
    """What a request has produced so far.

    Attributes:
        transfer: None, or whether it is a prompt for others ("prefill") or goes on from one that was handed over.
        params: where others find the keys and values of a finished prefill.
    """

    def __init__(self, request: GenerationRequest | ScoreRequest, internal_id: str, transfer: str | None) -> None:
        self.request, self.internal_id, self.transfer = request, internal_id, transfer
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.params: dict[str, Any] | None = None
        self.num_bytes = 0

    def extend(self, output: EngineCoreOutput) -> None:
        """Takes what a step added.

        Raises:
            RuntimeError: the log-probs are of other tokens. vLLM gives that of the sampled token first.
        """
        self.params = output.kv_transfer_params
        self.token_ids += output.new_token_ids
        if (found := output.new_logprobs) is None:  # a score request asks for none
            return
        if (tokens := found.logprob_token_ids[:, 0].tolist()) != output.new_token_ids:
            raise RuntimeError(f"request {self.request.request_id!r}: log-probs of {tokens}, of {output.new_token_ids}")
        self.logprobs += found.logprobs[:, 0].tolist()


def outcome(running: Running, record: Record | None, reason: str, version: Version, layout: TraceLayout) -> Outcome:
    """What an ended request becomes.

    Args:
        record: what the worker remembered of it; None if it never ran.
        reason: vLLM's finish reason.
        version: of the weights that served it.

    Raises:
        RuntimeError: it has tokens, and its trace has not a row for each of its inputs.
    """
    request = running.request
    if isinstance(request, ScoreRequest):
        return _score_result(request, record, reason, version)
    if running.transfer == "prefill":
        return _prefilled(running, record, reason, version, layout)
    if running.transfer == "decode" and reason == "error":
        return Lost(request_id=request.request_id, reason="keys and values did not arrive, see the engine's log")
    return GenerationResult(
        request_id=request.request_id,
        token_ids=tuple(running.token_ids),
        logprobs=tuple(running.logprobs),
        seed=request.effective_seed,
        version=version,
        finish_reason=reason,  # type: ignore[arg-type]
        trace=_trace(request, len(running.token_ids), record, layout),
        kv_bytes=running.num_bytes,
    )


def failed(
    request: GenerationRequest | ScoreRequest, error: Exception, version: Version
) -> GenerationResult | ScoreResult:
    """What a request becomes that could not run."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(request, ScoreRequest):
        return ScoreResult(request_id=request.request_id, logprobs=(), version=version, error=message)
    return GenerationResult(
        request_id=request.request_id,
        token_ids=(),
        logprobs=(),
        seed=request.effective_seed,
        version=version,
        finish_reason="error",
        error=message,
    )


def _trace(request: GenerationRequest, num_tokens: int, record: Record | None, layout: TraceLayout) -> Trace | None:
    if not num_tokens:
        return None
    num_inputs = len(request.prompt_token_ids) + num_tokens - 1
    if record is None or len(record.trace) < num_inputs * layout.row_bytes:
        got = "none" if record is None else f"{len(record.trace) // layout.row_bytes} rows"
        raise RuntimeError(f"request {request.request_id!r}: trace {got}, expected {num_inputs} rows")
    rows = record.trace[: num_inputs * layout.row_bytes]
    return Trace(layout.kind, (num_inputs, *layout.row_shape), rows)


def _prefilled(
    running: Running, record: Record | None, reason: str, version: Version, layout: TraceLayout
) -> Prefilled:
    request = running.request
    assert isinstance(request, GenerationRequest)
    if running.params is None or reason not in ("length", "stop"):
        error = None if reason == "abort" else f"the prompt's computation ended by {reason!r}"
        return Prefilled(request_id=request.request_id, error=error)
    rows = None
    if layout.prompt_value is None:
        trace = _trace(request, 1, record, layout)
        assert trace is not None
        rows = trace.data
    handover = Handover(prefill_id=running.internal_id, version=version, params=running.params, rows=rows)
    return Prefilled(request_id=request.request_id, handover=handover)


def _score_result(request: ScoreRequest, record: Record | None, reason: str, version: Version) -> ScoreResult:
    wanted = len(request.token_ids) - request.num_prompt_tokens
    scores = record.scores if record is not None and reason != "abort" else ()
    error = None if len(scores) == wanted else f"ended by {reason!r} before every token was scored"
    return ScoreResult(request_id=request.request_id, logprobs=scores, version=version, error=error)
