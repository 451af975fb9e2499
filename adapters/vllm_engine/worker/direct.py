"""Writes a version straight into the memory that is served, without vLLM's loader, once that is proven to be the same.

vLLM's loader takes every layer apart, loads it beside itself and copies it back: two copies and some hundred steps of
Python that end, for a model without quantisation, in each tensor's elements at a fixed place. `live_tensors` knows
those places, since digests are read there. Whether they are all that a load changes is not assumed: it is tried out,
with tensors of random numbers, on the very model that is served (`is_same_as`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from adapters.hf_convert.blocks import Blocks
from adapters.hf_convert.digests import Part, partial_digests
from adapters.threads import spread
from adapters.vllm_engine.worker.packed import forget_packed, write_blocks
from adapters.vllm_engine.worker.readback import served_state

if TYPE_CHECKING:
    from adapters.vllm_engine.worker.model_interface import LiveTensor, TracedModel

Named = Iterable[tuple[str, torch.Tensor]]
GROUP_BYTES = 256 << 20
"""Tensors that are read from a source before they are written together."""


def load_directly(model: TracedModel, live_tensors: Iterable[LiveTensor], tensors: Named) -> None:
    """Writes each tensor's part of this worker over what is served.

    Args:
        live_tensors: the model's.

    Raises:
        ValueError: a tensor is missing, unknown or repeated; some may have been written.
    """
    places = {live.name: live for live in live_tensors}
    is_on_host = any(isinstance(live.part, Blocks) or not live.part.is_cuda for live in places.values())
    for group in _groups(tensors):
        pairs = []
        for name, tensor in group:
            if (live := places.pop(name, None)) is None:
                raise ValueError(f"weights: got {name!r}, which the model lacks or which came before")
            pairs.append((_part_of(live, tensor), live.part))
        _write(pairs)
    if is_on_host:
        forget_packed(model)  # type: ignore[arg-type]  # a protocol cannot say that it is a module
    if places:
        raise ValueError(f"weights: {sorted(places)[:10]} are missing ({len(places)} in all)")


def is_same_as(load: Callable[[Named], None], model: TracedModel, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `load_directly` leaves everything that the model computes with as `load` does, bit for bit.

    Loads random tensors, others, and directly the first again: what `load` changes and is not written stays as the
    others made it. Leaves random tensors in the model.

    Args:
        load: takes every tensor of the model and serves them, by way of vLLM.
    """
    first, others = (_RandomTensors(model, seed, dtype=dtype, device=device) for seed in (1, 2))
    load(first)
    wanted = _state(model)
    load(others)
    try:
        load_directly(model, model.live_tensors(), first)
    except (RuntimeError, ValueError):  # a place that cannot be written to
        return False
    return _state(model) == wanted


class _RandomTensors:
    """Every tensor of a model with numbers of a seed, made when it is asked for, the same each time."""

    def __init__(self, model: TracedModel, seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = {live.name: live.shape for live in model.live_tensors()}
        self._seed, self._dtype, self._device = seed, dtype, device

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator(self._device).manual_seed(self._seed)
        for name, shape in self._shapes.items():
            yield name, torch.empty(shape, dtype=self._dtype, device=self._device).uniform_(-1, 1, generator=generator)


def _state(model: TracedModel) -> dict[str, int]:
    """Digests of everything that the model computes with."""
    state = dict(served_state(model))  # type: ignore[arg-type]
    parts = [Part(tensor=tensor, shape=tuple(tensor.shape)) for tensor in state.values()]
    return dict(zip(state, partial_digests(parts), strict=True))


def _groups(tensors: Named) -> Iterator[list[tuple[str, torch.Tensor]]]:
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        group.append((name, tensor))
        size += tensor.nbytes
        if size > GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


def _part_of(live: LiveTensor, whole: torch.Tensor) -> torch.Tensor:
    if tuple(whole.shape) != live.shape:
        raise ValueError(f"{live.name}: got shape {tuple(whole.shape)}, expected {live.shape}")
    if live.dim is None or tuple(live.part.shape) == live.shape:
        return whole
    return whole.narrow(live.dim, live.offset, live.part.shape[live.dim])


def _write(pairs: list[tuple[torch.Tensor, torch.Tensor | Blocks]]) -> None:
    """Copies each (source, target)."""
    if pairs and all(isinstance(target, torch.Tensor) and target.is_cuda for _, target in pairs):
        sources, targets = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
        return
    spread(_write_one, pairs, sizes=[source.nbytes for source, _ in pairs])


def _write_one(pair: tuple[torch.Tensor, torch.Tensor | Blocks]) -> None:
    source, target = pair
    if isinstance(target, Blocks):
        write_blocks(source, target)
    else:
        target.copy_(source)
