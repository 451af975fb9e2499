"""vLLM in this process: starts it with our worker, adds requests, steps, and turns its outputs into results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from adapters.contract import GenerationRequest, PluginMissing, ScoreRequest, Version
from adapters.vllm_engine.process.messages import Handover
from adapters.vllm_engine.process.outcomes import Outcome, Running, outcome
from adapters.vllm_engine.process.request_rules import Parameters, RequestRules
from adapters.vllm_engine.process.transfers import Transfers, prefill_params, reader_params, transfer_config
from adapters.vllm_engine.settings import EngineSettings
from adapters.vllm_engine.worker import patches

WORKER = "adapters.vllm_engine.worker.worker.TetherWorker"


class Core:
    """One vLLM engine, stepped by its owner. Not for use from several threads.

    Requests and outputs pass vLLM's core as they are: its front end would make, at every step, an object of each
    request's text, ranks and log-probs so far, of which nothing is wanted before the end.
    """

    def __init__(self, settings: EngineSettings) -> None:
        try:
            self.engine = LLMEngine.from_engine_args(_engine_args(settings))
        finally:
            _check_plugin()  # first: without it vLLM's own error would be about an unknown model
        (self.trace_layout, *_) = self.rpc("tether_install", settings.execution, settings.staging)
        self.model_config = self.engine.vllm_config.model_config
        self.transfers = Transfers(self.engine, self.rpc, settings.transfer) if settings.transfer else None
        self._running: dict[str, Running] = {}  # by vLLM's id
        self._internal_ids: dict[str, str] = {}  # vLLM's id of each request
        self.rules = RequestRules(
            layout=self.trace_layout,
            max_model_len=self.model_config.max_model_len,
            vocab_size=self.model_config.get_vocab_size(),
            policy_problem=lambda text: self.rpc("tether_check_policy", text)[0],
        )

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

    @property
    def is_busy(self) -> bool:
        """Whether stepping can change anything: requests, or prompts that others still have to read."""
        return bool(self._running) or (self.transfers is not None and self.transfers.pending)

    def add(self, request: GenerationRequest) -> None:
        """Raises ValueError if the request cannot run; the others are not touched."""
        self._add_generation(request, {})

    def add_prefill(self, request: GenerationRequest) -> None:
        """Computes the prompt of a request for others. Raises ValueError if the request cannot run."""
        self._add_generation(
            request, prefill_params(), transfer="prefill", max_tokens=1, ignore_eos=True, temperature=0
        )

    def add_decode(self, request: GenerationRequest, handover: Handover, readers: int, version: Version) -> None:
        """Goes on from a prompt that another engine computed under `version`, which this engine serves.

        Raises:
            ValueError: the request cannot run.
            StaleHandover: other weights computed the prompt.
        """
        extra = reader_params(handover, readers, version)
        if self.trace_layout.prompt_value is None:
            layout = self.trace_layout
            if handover.rows is None or len(handover.rows) != len(request.prompt_token_ids) * layout.row_bytes:
                raise ValueError(f"the handover lacks what the prompt's tokens ran, a row of {layout.kind} for each")
            extra["prompt_rows"] = handover.rows
        self._add_generation(request, extra, transfer="decode")

    def _add_generation(
        self, request: GenerationRequest, extra: dict[str, Any], *, transfer: str | None = None, **changes: Any
    ) -> None:
        parameters = self.rules.generation(request)
        parameters["extra_args"] |= extra
        # Blocks of a continued response hold what its tokens ran, not what a prompt's do: they are nobody else's.
        salt = None if request.trace is None else f"turn/{request.request_id}"
        self._add(request, request.prompt_token_ids, {**parameters, **changes}, cache_salt=salt, transfer=transfer)

    def add_score(self, request: ScoreRequest) -> None:
        """Scores ride as a prompt of all input tokens; its own cache salt keeps its blocks to itself."""
        salt = f"score/{request.request_id}"
        self._add(request, request.token_ids[:-1], self.rules.score(request), cache_salt=salt)

    def _add(
        self,
        request: GenerationRequest | ScoreRequest,
        tokens: Sequence[int],
        parameters: Parameters,
        cache_salt: str | None = None,
        transfer: str | None = None,
    ) -> None:
        if request.request_id in self._internal_ids:
            raise ValueError(f"request id {request.request_id!r} is already running")
        prompt: Any = {"prompt_token_ids": list(tokens)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        made = self.engine.input_processor.process_inputs(
            request.request_id,
            prompt,
            VllmSamplingParams(**parameters),
            supported_tasks=self.engine.get_supported_tasks(),
        )
        self.engine.input_processor.assign_request_id(made)
        self.engine.engine_core.add_request(made)
        self._running[made.request_id] = Running(request, made.request_id, transfer)
        self._internal_ids[request.request_id] = made.request_id

    def step(self, version: Version) -> list[Outcome]:
        """One scheduler step -> the requests it finished."""
        finished = []
        for output in self.engine.engine_core.get_output().outputs:
            if (running := self._running.get(output.request_id)) is None:
                continue  # of a request that ended here already
            running.extend(output)
            if output.finished:
                finished.append((running, str(output.finish_reason)))
        return self._finish(finished, version)

    def take_arrivals(self) -> list[tuple[str, int]]:
        """(request, bytes) of the handed over prompts whose keys and values came since the last call."""
        arrived = self.transfers.take_arrived() if self.transfers else {}
        found = [(self._running[i], num_bytes) for i, num_bytes in arrived.items() if i in self._running]
        for running, num_bytes in found:
            running.num_bytes = num_bytes
        return [(running.request.request_id, num_bytes) for running, num_bytes in found]

    def abort(self, request_ids: Sequence[str], version: Version) -> list[Outcome]:
        """Ends requests with what they have, each once; ids that are not running are ignored."""
        known = [r for r in dict.fromkeys(request_ids) if r in self._internal_ids]
        ended = [self._running[self._internal_ids[r]] for r in known]
        self.engine.engine_core.abort_requests([r.internal_id for r in ended])
        return self._finish([(r, "abort") for r in ended], version)

    def abort_all(self, version: Version) -> list[Outcome]:
        return self.abort(list(self._internal_ids), version)

    def drop_caches(self) -> None:
        """Forgets every cached block: their keys and values belong to other weights."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset the prefix cache while requests hold blocks of it")

    def _finish(self, ended: list[tuple[Running, str]], version: Version) -> list[Outcome]:
        if not ended:
            return []
        (records, *_) = self.rpc("tether_take", [r.internal_id for r, _ in ended])
        for running, _ in ended:
            del self._running[running.internal_id], self._internal_ids[running.request.request_id]
        return [
            outcome(running, record, reason, version, self.trace_layout)
            for (running, reason), record in zip(ended, records, strict=True)
        ]


def _check_plugin() -> None:
    if not patches.applied():
        raise PluginMissing(
            "vLLM started without Tether's plugin, see its log above for the reason. Is the project installed "
            "(scripts/setup.sh), so that the entry point vllm.general_plugins 'tether' exists?"
        )


_ANY_SHARE = 0.01  # vLLM demands this share of the device's memory to be free even when the cache's size is given


def _graph_args(settings: EngineSettings) -> dict[str, Any]:
    """Decode steps as CUDA graphs, without torch.compile: captured within seconds, and numbers as in eager mode."""
    if settings.enforce_eager or not current_platform.is_cuda():
        return {"enforce_eager": True}
    return {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": capture_sizes(settings.max_num_seqs),
        }
    }


def capture_sizes(most: int) -> list[int]:
    """Batch sizes of captured graphs, up to `most`: 1, 2, 4, 8, then at most a third apart. Others are padded up."""
    sizes, step = [1, 2, 4], 8
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] + step if sizes[-1] >= 8 else 8, most))
        step = max(8, sizes[-1] // 3 // 8 * 8)
    return sorted({min(size, most) for size in sizes})


def _engine_args(settings: EngineSettings) -> EngineArgs:
    return EngineArgs(
        model=str(settings.model),
        dtype=settings.dtype,
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
        kv_transfer_config=transfer_config(settings.transfer) if settings.transfer else None,
        **_graph_args(settings),
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER,
        async_scheduling=settings.async_scheduling and settings.transfer is None and current_platform.is_cuda(),
        disable_log_stats=True,
    )
