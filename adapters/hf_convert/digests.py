"""Digests of many tensors at once: one kernel and one synchronisation on CUDA, several threads on CPU.

The values are those of `digest`, whose functions take one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from adapters.hf_convert.blocks import Blocks
from adapters.hf_convert.digest import (
    EXPONENTS,
    check_place,
    copy_without_negative_zeros,
    finite_digest,
    partial_digest,
    place_in,
    render_digest,
    tensor_digest,
    words_of,
)
from adapters.threads import spread


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements [offset, offset + part.shape[dim]) along `dim` of a global tensor, as `partial_digest` takes them."""

    tensor: torch.Tensor | Blocks
    shape: tuple[int, ...]
    dim: int = 0
    offset: int = 0


def partial_digests(parts: Sequence[Part]) -> list[int]:
    """`partial_digest` of each.

    Raises:
        ValueError: a part does not fit into its global tensor.
    """

    def one(part: Part) -> int:
        return partial_digest(part.tensor, shape=part.shape, dim=part.dim, offset=part.offset)

    if (kernel := _kernel_for([part.tensor for part in parts])) is None:
        return spread(one, parts, sizes=[_num_bytes(part.tensor) for part in parts])
    spans = []
    for part in parts:
        assert isinstance(part.tensor, torch.Tensor)
        check_place(tuple(part.tensor.shape), part.shape, part.dim, part.offset)
        first, stride, rows = place_in(part.tensor.shape, part.shape, part.dim, part.offset)
        words = words_of(part.tensor)
        each = words.numel() // max(part.tensor.numel(), 1)
        columns = words.numel() // max(rows, 1)
        spans.append(kernel.Span(source=words, columns=columns, first=first * each, stride=stride * each))
    return [total for total, _ in _begin_sums(kernel, spans, exponent=0)()]


def finite_digests(tensors: Sequence[torch.Tensor]) -> list[tuple[str, bool]]:
    """`finite_digest` of each: its digest, and whether every element is finite."""
    if (kernel := _kernel_for(tensors)) is None:
        return spread(finite_digest, tensors, sizes=[tensor.nbytes for tensor in tensors])
    # Of 8 bytes an element is two words, of which the kernel cannot say whether they are finite.
    found = {i: finite_digest(tensor) for i, tensor in enumerate(tensors) if tensor.element_size() == 8}
    for exponent in {EXPONENTS.get(tensor.dtype, 0) for tensor in tensors}:
        chosen = [i for i, t in enumerate(tensors) if i not in found and EXPONENTS.get(t.dtype, 0) == exponent]
        spans = [kernel.Span(source=words_of(tensors[i]), columns=tensors[i].numel()) for i in chosen]
        sums = _begin_sums(kernel, spans, exponent=exponent)()
        found |= {i: (render_digest(total), is_finite) for i, (total, is_finite) in zip(chosen, sums, strict=True)}
    return [found[i] for i in range(len(tensors))]


def copies_without_negative_zeros(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """`copy_without_negative_zeros` of each (source, target): the digests of what was written."""
    return begin_copies(pairs)()


def begin_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], list[str]]:
    """Starts `copies_without_negative_zeros`; what it returns waits for the end and gives the digests.

    Args:
        pairs: of the same shape and dtype, on one device; a source may be its own target.
    """
    targets = [target for _, target in pairs]
    if (kernel := _kernel_for([source for source, _ in pairs])) is None:
        digests = spread(lambda pair: copy_without_negative_zeros(*pair), pairs, sizes=[t.nbytes for t in targets])
        return lambda: digests
    assert all(target.is_contiguous() for target in targets)
    spans, others = {}, {}
    for i, (source, target) in enumerate(pairs):
        if source.dtype in EXPONENTS:
            spans[i] = kernel.Span(source=words_of(source), columns=source.numel(), target=target)
        elif source.is_floating_point():
            others[i] = copy_without_negative_zeros(source, target)
        else:
            others[i] = tensor_digest(target.copy_(source))
    sums = _begin_sums(kernel, list(spans.values()), exponent=0)

    def end() -> list[str]:
        digests = others | {i: render_digest(total) for i, (total, _) in zip(spans, sums(), strict=True)}
        return [digests[i] for i in range(len(pairs))]

    return end


def _begin_sums(kernel: ModuleType, spans: Sequence[Any], *, exponent: int) -> Callable[[], list[tuple[int, bool]]]:
    """Starts the kernels; what it returns waits for them and gives each span's sum, and whether it is finite.

    Launched by element size, and apart where rows lie apart, which costs a division an element.
    """
    kinds = [(span.source.element_size(), span.columns == span.source.numel()) for span in spans]
    launched = []
    for kind in dict.fromkeys(kinds):
        if chosen := [i for i, k in enumerate(kinds) if k == kind and spans[i].source.numel()]:
            of_kind = [spans[i] for i in chosen]
            launched.append((chosen, kernel.sums_of_products(of_kind, exponent=exponent)))

    def end() -> list[tuple[int, bool]]:
        found = [(0, True)] * len(spans)
        for chosen, sums in launched:
            for i, (total, not_finite) in zip(chosen, sums.tolist(), strict=True):
                found[i] = total % 2**64, not not_finite
        return found

    return end


def _num_bytes(part: torch.Tensor | Blocks) -> int:
    return part.memory.nbytes if isinstance(part, Blocks) else part.nbytes


def _kernel_for(tensors: Sequence[torch.Tensor | Blocks]) -> ModuleType | None:
    """The Triton kernel, if all tensors are on one CUDA device and it is installed."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    is_cuda = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return _kernel() if is_cuda and not any(isinstance(tensor, Blocks) for tensor in tensors) else None


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from adapters.hf_convert import digest_triton

        return digest_triton
    except (ImportError, RuntimeError):
        return None
