"""Selected-token log-probs without the [rows, vocabulary] matrix of the whole batch.

Legend: R scored rows, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def selected_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    chunk_rows: int = 2048,
) -> Tensor:
    """log_softmax(head(hidden) / temperature) at the targets, in fp32.

    The logits of one chunk live at a time, in backward too, where they are computed again.

    Args:
        hidden: [R, H] states from which the targets are predicted, whole on every tensor-parallel rank.
        head: [rows, H] -> [rows, V / tp], this rank's slice of the logits.
        targets: [R] int64 token ids.
        temperature: one value, or [R] in fp32, > 0. The distribution is the one that a rollout at this temperature drew
            from; with another one the ratio of the policy loss does not start at 1.
        chunk_rows: rows of logits alive at once.

    Returns:
        [R] fp32, equal on all tensor-parallel ranks.
    """
    rows = hidden.shape[0]
    if not isinstance(temperature, Tensor):
        temperature = torch.full((rows,), float(temperature), device=hidden.device)

    def part(hidden: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        # The division makes a new tensor: vocab_parallel_cross_entropy overwrites its input.
        return -vocab_parallel_cross_entropy(head(hidden).float() / temperature[:, None], targets)

    parts = []
    for chunk in zip(hidden.split(chunk_rows), targets.split(chunk_rows), temperature.split(chunk_rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(part, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(*chunk))
    return torch.cat(parts)
