"""vLLM in this process: starts it with our worker, adds requests, steps, and turns its outputs into results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from adapters.contract import (
    GenerationRequest,
    GenerationResult,
    PluginMissing,
    ScoreRequest,
    ScoreResult,
    Trace,
    Version,
)

from . import patches
from .records import Record
from .settings import EngineSettings

WORKER = "adapters.vllm_engine.worker.TetherWorker"


class Running:
    """What a request has produced so far."""

    def __init__(self, request: GenerationRequest | ScoreRequest, internal_id: str) -> None:
        self.request, self.internal_id = request, internal_id
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []


class Core:
    """One vLLM engine, stepped by its owner. Not for use from several threads."""

    def __init__(self, settings: EngineSettings) -> None:
        try:
            self.engine = LLMEngine.from_engine_args(_engine_args(settings))
        finally:
            _check_plugin()  # first: without it vLLM's own error would be about an unknown model
        (self.trace_layout, *_) = self.rpc("tether_install", settings.execution, settings.staging)
        self.model_config = self.engine.vllm_config.model_config
        self._running: dict[str, Running] = {}
        self._policy_errors: dict[str, str | None] = {}

    @property
    def trace_kind(self) -> str:
        return self.trace_layout.kind

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a worker method on every worker."""
        return self.engine.collective_rpc(method, args=args)

    def check_workers(self) -> None:
        """Raises RuntimeError if a worker process died: what is left cannot serve anything."""
        if getattr(self.engine.model_executor, "is_failed", False):
            raise RuntimeError("a worker process of the engine died, see the log above")

    def close(self) -> None:
        """Ends vLLM's workers and removes their shared memory."""
        self.engine.engine_core.shutdown()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: GenerationRequest) -> None:
        """Raises ValueError if the request cannot run; the others are not touched."""
        self._check_policy(request.execution)
        sampling, trace = request.sampling, request.trace
        extra: dict[str, Any] = {"execution": request.execution}
        if trace is not None:
            self._check_trace(trace, min(len(request.prompt_token_ids), trace.shape[0]))
            extra["trace"] = trace.data
        params = VllmSamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            seed=request.effective_seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        room = self.model_config.max_model_len - len(request.prompt_token_ids)
        if sampling.max_tokens > room:
            raise ValueError(
                f"max_tokens: got {sampling.max_tokens} after a prompt of {len(request.prompt_token_ids)} tokens, "
                f"expected at most {room}: the engine's sequences end at {self.model_config.max_model_len}"
            )
        # Blocks of a continued response hold what its tokens ran, not what a prompt's do: they are nobody else's.
        self._add(request, request.prompt_token_ids, params, None if trace is None else f"turn/{request.request_id}")

    def add_score(self, request: ScoreRequest) -> None:
        """Scores ride as a prompt of all input tokens; its own cache salt keeps its blocks to itself."""
        inputs, trace = request.token_ids[:-1], request.trace
        if trace is not None:
            self._check_trace(trace, len(inputs))
        targets = request.token_ids[request.num_prompt_tokens :]
        self._check_tokens(targets)
        extra: dict[str, Any] = {
            "first": request.num_prompt_tokens - 1,
            "targets": list(targets),
            "temperature": request.temperature if request.mode == "processed" else 1.0,
        }
        if trace is not None:
            extra["trace"] = trace.data
        params = VllmSamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra)
        self._add(request, inputs, params, cache_salt=f"score/{request.request_id}")

    def _add(
        self,
        request: GenerationRequest | ScoreRequest,
        tokens: Sequence[int],
        params: VllmSamplingParams,
        cache_salt: str | None = None,
    ) -> None:
        if request.request_id in self._running:
            raise ValueError(f"request id {request.request_id!r} is already running")
        self._check_tokens(tokens)
        prompt: Any = {"prompt_token_ids": list(tokens)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        internal_id = self.engine.add_request(request.request_id, prompt, params)
        self._running[request.request_id] = Running(request, internal_id)

    def _check_trace(self, trace: Trace, num_inputs: int) -> None:
        layout = self.trace_layout
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

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocabulary = self.model_config.get_vocab_size()
        if unknown := [t for t in tokens if not 0 <= t < vocabulary]:
            raise ValueError(f"got token ids {unknown[:10]}, expected 0 <= id < {vocabulary}")

    def _check_policy(self, text: str | None) -> None:
        if text is None:
            return
        if text not in self._policy_errors:
            (self._policy_errors[text], *_) = self.rpc("tether_check_policy", text)
        if error := self._policy_errors[text]:
            raise ValueError(error)

    def step(self, version: Version) -> list[GenerationResult | ScoreResult]:
        """One scheduler step -> the requests it finished."""
        finished = []
        for output in self.engine.step():
            running = self._running[output.request_id]
            (completion,) = output.outputs
            running.token_ids += completion.token_ids
            if completion.logprobs is not None:  # a score request asks for none
                for token, choices in zip(completion.token_ids, completion.logprobs, strict=True):
                    running.logprobs.append(choices[token].logprob)
            if output.finished:
                finished.append((running, str(completion.finish_reason)))
        return self._finish(finished, version)

    def abort(self, request_ids: Sequence[str], version: Version) -> list[GenerationResult | ScoreResult]:
        """Ends requests with what they have; ids that are not running are ignored."""
        ended = [self._running[r] for r in request_ids if r in self._running]
        self.engine.abort_request([r.request.request_id for r in ended])
        return self._finish([(r, "abort") for r in ended], version)

    def abort_all(self, version: Version) -> list[GenerationResult | ScoreResult]:
        return self.abort(list(self._running), version)

    def drop_caches(self) -> None:
        """Forgets every cached block: their keys and values belong to other weights."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset the prefix cache while requests hold blocks of it")

    def _finish(self, ended: list[tuple[Running, str]], version: Version) -> list[GenerationResult | ScoreResult]:
        if not ended:
            return []
        (records, *_) = self.rpc("tether_take", [r.internal_id for r, _ in ended])
        results: list[GenerationResult | ScoreResult] = []
        for (running, reason), record in zip(ended, records, strict=True):
            del self._running[running.request.request_id]
            if isinstance(running.request, ScoreRequest):
                results.append(_score_result(running.request, record, reason, version))
            else:
                results.append(self._generation_result(running, record, reason, version))
        return results

    def _generation_result(
        self, running: Running, record: Record | None, reason: str, version: Version
    ) -> GenerationResult:
        request = running.request
        assert isinstance(request, GenerationRequest)
        num_inputs = len(request.prompt_token_ids) + len(running.token_ids) - 1
        trace = None
        if running.token_ids:
            layout = self.trace_layout
            if record is None or len(record.trace) < num_inputs * layout.row_bytes:
                got = "none" if record is None else f"{len(record.trace) // layout.row_bytes} rows"
                raise RuntimeError(f"request {request.request_id!r}: trace {got}, expected {num_inputs} rows")
            rows = record.trace[: num_inputs * layout.row_bytes]
            trace = Trace(layout.kind, (num_inputs, *layout.row_shape), rows)
        return GenerationResult(
            request_id=request.request_id,
            token_ids=tuple(running.token_ids),
            logprobs=tuple(running.logprobs),
            seed=request.effective_seed,
            version=version,
            finish_reason=reason,  # type: ignore[arg-type]
            trace=trace,
        )


def _check_plugin() -> None:
    if not patches.applied():
        raise PluginMissing(
            "vLLM started without Tether's plugin, see its log above for the reason. Is the project installed "
            "(scripts/setup.sh), so that the entry point vllm.general_plugins 'tether' exists?"
        )


def _score_result(request: ScoreRequest, record: Record | None, reason: str, version: Version) -> ScoreResult:
    wanted = len(request.token_ids) - request.num_prompt_tokens
    scores = record.scores if record is not None and reason != "abort" else ()
    error = None if len(scores) == wanted else f"ended by {reason!r} before every token was scored"
    return ScoreResult(request_id=request.request_id, logprobs=scores, version=version, error=error)


_ANY_SHARE = 0.01  # vLLM demands this share of the device's memory to be free even when the cache's size is given


def _engine_args(settings: EngineSettings) -> EngineArgs:
    return EngineArgs(
        model=str(settings.model),
        dtype=settings.dtype,  # type: ignore[arg-type]
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization if settings.kv_cache_bytes is None else _ANY_SHARE,
        num_gpu_blocks_override=settings.num_kv_blocks,
        block_size=settings.block_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        tensor_parallel_size=settings.tensor_parallel,
        seed=settings.seed,
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER,
        async_scheduling=False,
        disable_log_stats=True,
    )
