"""What a CUDA graph of a decode step computes, run without a graph, so that a CPU can tell whether it is right.

Every step with one token per request goes through `DecodeGraphs`, as on CUDA; only vLLM's capture is left out.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class Uncaptured:
    """Calls what would have been captured."""

    def __init__(self, run: Any, *_: Any) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


def through_graphs() -> None:
    from providers.ouro import decode_graphs, engine_layers

    decode_graphs.CUDAGraphWrapper = Uncaptured  # type: ignore[misc,assignment]
    model, init = engine_layers.OuroModel, engine_layers.OuroModel.__init__
    current: list[Any] = [None]

    def with_graphs(self: Any, *, config: Any, vllm_config: Any, prefix: str = "") -> None:
        init(self, config=config, vllm_config=vllm_config, prefix=prefix)
        sizes: Any = SimpleNamespace(compilation_config=SimpleNamespace(max_cudagraph_capture_size=64))
        width = config.num_kv_heads * config.head_dim
        self.graphs = decode_graphs.DecodeGraphs(self, sizes, hidden_size=config.hidden_size, kv_width=width)

    def is_replayable() -> bool:
        step = current[0].step
        return step is not None and bool((np.diff(step.bounds) == 1).all())

    forward = model.forward

    def remembered(self: Any, *args: Any, **kwargs: Any) -> Any:
        current[0] = self
        return forward(self, *args, **kwargs)

    model.__init__, model.forward = with_graphs, remembered  # type: ignore[method-assign]
    engine_layers.is_replayable = is_replayable


def without_held_rows() -> None:
    """A row that left puts what it computes after its last loop into the deeper planes."""
    from providers.ouro.decode_graphs import DecodeGraphs

    through_graphs()
    DecodeGraphs._hold = lambda self, index, stays, k, v: (k, v)  # type: ignore[method-assign]


def without_leaving() -> None:
    """A row that left goes on computing, and its last state is lost."""
    from providers.ouro.decode_graphs import DecodeGraphs

    through_graphs()
    DecodeGraphs.leave = lambda *args: None  # type: ignore[method-assign]


def with_another_rule() -> None:
    """The device adds up chances to leave without what is left to leave."""
    import torch

    from providers.ouro.device_exits import DeviceExits

    through_graphs()
    after = DeviceExits.after

    def changed(self: Any, loop: int, chance: Any) -> Any:
        self._survival = torch.ones_like(self._survival)
        return after(self, loop, chance)

    DeviceExits.after = changed  # type: ignore[method-assign]


MUTATIONS = {function.__name__: function for function in (without_held_rows, without_leaving, with_another_rule)}
