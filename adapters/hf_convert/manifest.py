"""Describes tensors for a publication, an export or a comparison: name, shape, dtype and digest of each."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from adapters.contract import Manifest, TensorSpec
from adapters.hf_convert.digest import tensor_digest
from adapters.hf_convert.dtypes import dtype_name


def spec_of(name: str, tensor: torch.Tensor, *, digest: str | None = None) -> TensorSpec:
    """One whole tensor, described. `digest` is the tensor's, where it is known already."""
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        digest=tensor_digest(tensor) if digest is None else digest,
    )


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
    """Describes tensors in the order in which they arrive, holding one at a time."""
    return Manifest(tensors=tuple(spec_of(name, tensor) for name, tensor in tensors))
