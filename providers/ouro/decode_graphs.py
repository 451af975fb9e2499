"""The loops of a decode step as CUDA graphs: one per loop and batch size, so that no graph fixes a depth.

vLLM says when a step may be replayed (one token per request, padded to a captured size), keeps the attention metadata
at fixed addresses, and has its own wrapper capture and replay. What the loops hand to each other lies here, at fixed
addresses too. A row that leaves stays in the batch, for a graph has one size: later loops keep its state and put the
keys and values of its last loop into their planes, which is all that a token which left may do.

Shape suffixes: N rows of the step with vLLM's padding, H hidden, C key/value heads * head width of this worker, T
loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context


def is_replayable() -> bool:
    """Whether vLLM runs this forward as a captured decode step, or captures one."""
    return get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL


class Looped(Protocol):
    """What is captured of a model: its layers, each loop's planes of attention, and the norm that ends a loop."""

    num_loops: int
    layers: Any
    planes: Any
    norm: Any


class DecodeGraphs:
    """The loops of one model over at most `max_cudagraph_capture_size` rows.

    Args:
        model: its layers, planes and norm.
        vllm_config: with decode steps to be captured whole.
        hidden_size: H.
        kv_width: C.
    """

    def __init__(self, model: Looped, vllm_config: VllmConfig, *, hidden_size: int, kv_width: int) -> None:
        rows, layers = vllm_config.compilation_config.max_cudagraph_capture_size, len(model.layers)
        self.hidden_NH = torch.zeros(rows, hidden_size)
        self.stays_N1 = torch.ones(rows, 1, dtype=torch.bool)
        self.keys, self.values = (torch.zeros(layers, rows, kv_width) for _ in range(2))
        self.lengths_TN, self._one = (
            torch.ones(model.num_loops, rows, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
        )
        self._model = model

        def captured(hold: bool) -> list[CUDAGraphWrapper]:
            options = CUDAGraphOptions(gc_disable=True, weak_ref_output=False)
            return [
                CUDAGraphWrapper(partial(self._loop, loop, hold), vllm_config, CUDAGraphMode.FULL, options)
                for loop in range(1, model.num_loops + 1)
            ]

        self._whole, self._held = captured(False), captured(True)

    def begin(self, h_NH: torch.Tensor) -> None:
        """Takes the embedded tokens of a step; every row stays."""
        self.hidden_NH[: len(h_NH)].copy_(h_NH)
        self.stays_N1[: len(h_NH)].fill_(True)

    def whole(self, loop: int, positions: torch.Tensor) -> torch.Tensor:
        """Runs a loop of a step in which nobody has left -> its normed state [N, H]. `positions`: vLLM's own buffer."""
        return self._whole[loop - 1](positions)

    def held(self, loop: int, positions: torch.Tensor) -> torch.Tensor:
        """Runs a loop for the rows that stay, remembers their keys and values, and leaves the others as they are.

        Loops of a step in which some leave before others are all run this way, from the first on; also one that nobody
        runs any more, for its planes get what each row had in its last loop.
        """
        return self._held[loop - 1](positions)

    def leave(self, stays: torch.Tensor) -> None:
        """[rows before the padding] bool, on the device: which of them go on in later loops."""
        self.stays_N1[: len(stays), 0].copy_(stays)

    def capture_rest(self, positions: torch.Tensor) -> None:
        """Captures, in a dummy run of this batch size, what `whole` leaves out; nothing if that was done."""
        if self._is_captured():
            return
        for loop in range(1, self._model.num_loops + 1):
            self.held(loop, positions)

    def _is_captured(self) -> bool:
        return get_forward_context().batch_descriptor in self._held[0].concrete_cudagraph_entries

    def _loop(self, loop: int, hold: bool, positions: torch.Tensor) -> torch.Tensor:
        rows = len(positions)
        hidden_NH, stays_N1 = self.hidden_NH[:rows], self.stays_N1[:rows]
        if not hold:
            return hidden_NH.copy_(self._layers(loop, positions, hidden_NH, None))
        with self._short_contexts(loop, stays_N1):
            x_NH = self._layers(loop, positions, hidden_NH, stays_N1)
        return torch.where(stays_N1, x_NH, hidden_NH, out=hidden_NH)

    def _layers(
        self, loop: int, positions: torch.Tensor, x_NH: torch.Tensor, stays_N1: torch.Tensor | None
    ) -> torch.Tensor:
        model = self._model
        for index, (layer, plane) in enumerate(zip(model.layers, self._planes(loop), strict=True)):
            hold = None if stays_N1 is None else partial(self._hold, index, stays_N1)
            x_NH, _, _ = layer(x_NH, positions, plane, hold)
        return model.norm(x_NH)

    @contextmanager
    def _short_contexts(self, loop: int, stays_N1: torch.Tensor) -> Iterator[None]:
        """Rows that left look at one token: nobody reads what they find, and the rest of their context is not loaded.

        The kernels of CUDA take lengths from the device; what they plan on the host beforehand is left out.
        """
        metadata = get_forward_context().attn_metadata
        names = [plane.layer_name for plane in self._planes(loop)]
        given = {name: metadata[name] for name in names}
        if stays_N1.is_cuda:
            lengths, whole = self.lengths_TN[loop - 1, : len(stays_N1)], given[names[0]]
            torch.where(stays_N1[:, 0], whole.seq_lens, self._one, out=lengths)
            metadata.update(dict.fromkeys(names, replace(whole, seq_lens=lengths, scheduler_metadata=None)))
        yield
        metadata.update(given)

    def _hold(
        self, index: int, stays_N1: torch.Tensor, k_NC: torch.Tensor, v_NC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> keys and values for the plane: of this loop where the row stays, else those it had in its last one."""
        kept = self.keys[index, : len(k_NC)], self.values[index, : len(k_NC)]
        for new, last in zip((k_NC, v_NC), kept, strict=True):
            torch.where(stays_N1, new, last, out=last)
        return kept

    def _planes(self, loop: int) -> Any:
        """vLLM's attention layers of a loop."""
        return self._model.planes[loop - 1]
