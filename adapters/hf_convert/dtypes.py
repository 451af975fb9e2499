"""Dtype names as manifests, configs and messages spell them: "float32", not torch.float32 and not F32."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights may be stored and published in."""

_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_from_safetensors(code: str) -> str:
    """The name of a safetensors dtype code; a code that no weight of ours has stays as it is ("F8_E4M3")."""
    return _SAFETENSORS.get(code, code)


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
