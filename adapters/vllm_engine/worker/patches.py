"""Every change we make to vLLM, one named function each, with its reason and a check of what it relies on.

Written against vLLM 0.32. A patch that no longer fits raises at start, naming what moved, instead of misbehaving later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from adapters.vllm_engine.worker.packed import PackedLinear, PackedWhenUsed, can_pack

_MARK = "_tether_patch"


def expect_parameters(function: Callable[..., Any], names: list[str]) -> None:
    """Raises RuntimeError unless the function's parameters begin with these names."""
    found = list(inspect.signature(function).parameters)
    if found[: len(names)] != names:
        raise RuntimeError(
            f"{function.__qualname__} takes {found}, expected it to begin with {names}: vLLM moved. "
            "Use the pinned version (docs/upstream.md) or review this patch"
        )


def apply() -> None:
    """Applies every process-wide patch. Idempotent."""
    cache_only_prompt_blocks()
    pack_linears_readably()
    let_models_capture_themselves()


def applied() -> bool:
    """True if the plugin ran in this process. vLLM starts without a plugin that failed, so the engine asks."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    return hasattr(KVCacheCoordinator.cache_blocks, _MARK)


def cache_only_prompt_blocks() -> None:
    """Keeps blocks of generated and of scored tokens out of the prefix cache.

    Reason: they may have run less of the model than a prompt token does; their keys and values must never serve as
    somebody's prompt. vLLM caches every full block. A request for prompt log-probs has only scored tokens.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    original = KVCacheCoordinator.cache_blocks
    if hasattr(original, _MARK):
        return
    expect_parameters(original, ["self", "request", "num_computed_tokens"])

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        scores = getattr(request.sampling_params, "prompt_logprobs", None) is not None
        original(self, request, 0 if scores else min(num_computed_tokens, request.num_prompt_tokens))

    setattr(cache_blocks, _MARK, True)
    KVCacheCoordinator.cache_blocks = cache_blocks


def pack_linears_readably() -> None:
    """On CPU, packs linear weights as torch's own oneDNN tensors instead of vLLM's handlers to the same library.

    Reason: a handler is a number that nothing can be read from but products, so a fingerprint of what is served would
    cost a product with the identity per layer. The memory of torch's packed tensor can be read and be written again
    (`packed`). Kernels and results are the same, bit for bit (`tests/unit/vllm_engine/test_readback.py`). Where torch
    cannot pack a dtype on this processor, vLLM's choice stays.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, _MARK) or not current_platform.is_cpu():
        return
    expect_parameters(original, ["layer", "remove_weight"])

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or not can_pack(weight.dtype):
            return original(layer, remove_weight)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            layer.cpu_linear = PackedWhenUsed()
            return
        if isinstance(packed := getattr(layer, "cpu_linear", None), PackedLinear):
            packed.load(weight)
        else:
            layer.cpu_linear = PackedLinear(weight)
        if remove_weight:
            empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
            layer.weight = torch.nn.Parameter(empty, requires_grad=False)

    setattr(dispatch, _MARK, True)
    utils.dispatch_cpu_unquantized_gemm = dispatch


def let_models_capture_themselves() -> None:
    """Takes a model of ours out of the CUDA graph that vLLM wraps around a whole forward.

    Reason: such a graph would fix the depth of a looped model, and hide from the model what its tokens run. Ours wrap
    their own parts with vLLM's wrapper, so that capture, replay, padding and memory are vLLM's all the same.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from adapters.vllm_engine.worker.model_interface import TracedModel

    original = GPUModelRunner.load_model
    if hasattr(original, _MARK):
        return
    expect_parameters(original, ["self"])

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(model := self.get_model(), TracedModel):
            self.model = model

    setattr(load_model, _MARK, True)
    GPUModelRunner.load_model = load_model


class RewindGenerator(torch.Generator):
    """A CPU generator that can take back its latest draw.

    Reason: vLLM undoes the draw of a partial prefill with `set_offset(get_offset() - 4)`, which only CUDA generators
    have; a seeded request whose prompt is computed in chunks fails on CPU.
    """

    _OFFSET = 4

    def mark(self) -> None:
        """Remembers the state before a draw that `set_offset` may take back."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return self._OFFSET

    def set_offset(self, offset: int) -> None:  # type: ignore[override]  # torch names a return value that it has not
        if offset != 0:
            raise RuntimeError(f"got offset {offset!r}, expected 0: vLLM no longer takes back exactly one draw")
        self.set_state(self._marked)


def rewind_discarded_draws(runner: Any) -> None:
    """Gives requests whose prefill is incomplete a generator that can be rewound. Only needed on CPU."""
    if runner.device.type != "cpu":
        return
    original = runner._sample
    expect_parameters(original, ["logits", "spec_decode_metadata"])

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for i in np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]):
            if (generator := batch.generators.get(int(i))) is None:
                continue
            if not isinstance(generator, RewindGenerator):
                state, generator = generator.get_state(), RewindGenerator()
                generator.set_state(state)
                batch.generators[int(i)] = runner.requests[batch.req_ids[i]].generator = generator
            generator.mark()
        return original(*args, **kwargs)

    runner._sample = sample


PROGRESS_MICROSECONDS = 100


def rest_between_progress() -> None:
    """Lets NIXL's progress thread sleep between two looks at its connections. Idempotent.

    Reason: NIXL 1.5 sets the delay to 0, so the thread of every agent keeps a core busy for ever; on a CPU engine that
    core is taken from the model, and even transfers become slower by it.
    """
    from nixl._api import nixlBind

    original = nixlBind.nixlAgentConfig
    if hasattr(original, _MARK):
        return
    if not hasattr(original, "pthrDelay"):
        raise RuntimeError("nixlAgentConfig has no pthrDelay: NIXL moved. Use the pinned version or review this patch")

    class RestingConfig(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_MICROSECONDS if name == "pthrDelay" else value)

    setattr(RestingConfig, _MARK, True)
    nixlBind.nixlAgentConfig = RestingConfig
