"""Every change we make to vLLM, one named function each, with its reason and a check of what it relies on.

Written against vLLM 0.32. A patch that no longer fits raises at start, naming what moved, instead of misbehaving later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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


def applied() -> bool:
    """True if the plugin ran in this process. vLLM starts without a plugin that failed, so the engine asks."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    return hasattr(KVCacheCoordinator.cache_blocks, _MARK)


def cache_only_prompt_blocks() -> None:
    """Keeps blocks of generated tokens out of the prefix cache.

    Reason: a generated token may have run less of the model than a prompt token does; its keys and values must never
    serve as somebody's prompt. vLLM caches every full block.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    original = KVCacheCoordinator.cache_blocks
    if hasattr(original, _MARK):
        return
    expect_parameters(original, ["self", "request", "num_computed_tokens"])

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        original(self, request, min(num_computed_tokens, request.num_prompt_tokens))

    setattr(cache_blocks, _MARK, True)
    KVCacheCoordinator.cache_blocks = cache_blocks  # type: ignore[method-assign]


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

    def set_offset(self, offset: int) -> None:
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
