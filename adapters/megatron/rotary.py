"""The angles of rotary position embedding, in fp32; `elementwise.rotate` turns by them.

Legend: N packed rows, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, D] of positions [N], with the digits of `dtype`, held in fp32 (in fp64 for an fp64 model).

    vLLM's and transformers' tables are of the model's dtype, and rotate with what is left of the angles' digits.

    Not a module with a buffer: Float16Module would round the frequencies to bf16, and far positions would turn wrongly.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide)[:, None] * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos().to(dtype).to(wide), angles.sin().to(dtype).to(wide)
