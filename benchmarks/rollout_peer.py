"""The peer in `benchmarks.rollout`: vLLM itself on the same model, without our trace, policy and worker code.

Of Ouro, which vLLM does not have, our layers at full depth; of OLMoE vLLM's own class, without our plugin. Both in the
CUDA graphs that vLLM puts around a whole forward, without torch.compile, as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adapters.contract import derive_seed
from benchmarks.rollout_cases import PROMPT, RESPONSE, config_of, prompts
from benchmarks.rollout_engines import Run
from benchmarks.rollout_limits import cache_bytes, loops_of

MODULES = {"ouro-1.4b": "providers.ouro.engine", "olmoe-1b-7b": "vllm.model_executor.models.olmoe"}
"""Where the class comes from that the peer runs."""


def environment(model: str) -> dict[str, str]:
    """Over that of an engine process: vLLM finds no plugin where it has the model itself."""
    return {} if MODULES[model].startswith("providers.") else {"VLLM_PLUGINS": ""}


def start_peer(model: Path, name: str, most: int) -> tuple[Run, Callable[[], None]]:
    """How to run a batch, and how to end the engine.

    Raises:
        RuntimeError: vLLM built another class than the peer's.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    if MODULES[name].startswith("providers."):
        leave_graphs_to_vllm()
    vllm = LLMEngine.from_engine_args(arguments(model, most))
    (built,) = vllm.collective_rpc(module_of_model)
    if built != MODULES[name]:
        raise RuntimeError(f"the peer runs a model of {built!r}, expected {MODULES[name]!r}")

    def run(policy: str, count: int, response: int, repeat: int) -> float:
        for i, prompt in enumerate(prompts(model, count)):
            params = VllmSamplingParams(
                max_tokens=response, ignore_eos=True, logprobs=0, seed=derive_seed(repeat, i) % 2**63, detokenize=False
            )
            vllm.add_request(f"{response}-{repeat}-{i}", {"prompt_token_ids": list(prompt)}, params)
        while vllm.has_unfinished_requests():
            vllm.step()
        return float(loops_of(config_of(model)))

    return run, vllm.engine_core.shutdown


def module_of_model(worker: Any) -> str:
    """In vLLM's worker: where the class of the model comes from that it runs."""
    return type(worker.get_model()).__module__


def leave_graphs_to_vllm() -> None:
    """One graph around a whole forward, at full depth, instead of our model's own."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from adapters.vllm_engine.worker import patches
    from providers.ouro import engine_layers

    setattr(GPUModelRunner.load_model, patches._MARK, True)
    engine_layers.is_replayable = lambda: False


def arguments(model: Path, most: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from adapters.vllm_engine.process.core import capture_sizes

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": capture_sizes(most)}
    options: dict[str, Any] = {"compilation_config": graphs} if torch.cuda.is_available() else {"enforce_eager": True}
    return EngineArgs(
        model=str(model),
        max_model_len=PROMPT + RESPONSE,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=cache_bytes(model, most),
        gpu_memory_utilization=0.01,
        block_size=32,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **options,
    )
