"""Selected-token log-probs, and entropies, without the [rows, vocabulary] matrix of the whole batch.

Legend: R scored rows, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from adapters.megatron.elementwise import is_fused


def selected_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    chunk_rows: int = 2048,
    with_entropy: bool = False,
) -> Tensor:
    """log_softmax(head(hidden) / temperature) at the targets, in fp32.

    The logits of one chunk live at a time, in backward too, where they are computed again.

    Args:
        hidden: [R, H] states from which the targets are predicted, whole on every tensor-parallel rank.
        head: [rows, H] -> [rows, V / tp], this rank's slice of the logits. One with a `weight` [V / tp, H] is taken to
            be a product with it, without a bias; on CUDA in half precision Triton kernels then read its logits.
        targets: [R] int64 token ids.
        temperature: one value, or [R] in fp32, > 0. The distribution is the one that a rollout at this temperature drew
            from; with another one the ratio of the policy loss does not start at 1.
        chunk_rows: rows of logits alive at once.
        with_entropy: also the entropy of each row's distribution, at its temperature.

    Returns:
        [R] fp32, or with entropies [2, R]; equal on all tensor-parallel ranks.
    """
    rows = hidden.shape[0]
    if not isinstance(temperature, Tensor):
        temperature = torch.full((rows,), float(temperature), device=hidden.device)
    weight = getattr(head, "weight", None)
    if is_fused(hidden) and weight is not None:
        from adapters.megatron.kernels import logprob

        return logprob.selected_logprobs(
            hidden, weight, head, targets, temperature, chunk_rows=chunk_rows, with_entropy=with_entropy
        )

    def part(hidden: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        # The division makes a new tensor: vocab_parallel_cross_entropy overwrites its input.
        logits = head(hidden).float() / temperature[:, None]
        if not with_entropy:
            return -vocab_parallel_cross_entropy(logits, targets)
        entropy = vocab_parallel_entropy(logits)
        return torch.stack([-vocab_parallel_cross_entropy(logits.clone(), targets), entropy])

    parts = []
    for chunk in zip(hidden.split(chunk_rows), targets.split(chunk_rows), temperature.split(chunk_rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(part, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(*chunk))
    return torch.cat(parts, -1)


def vocab_parallel_entropy(logits: Tensor) -> Tensor:
    """[rows] entropies in nats of softmax over the vocabulary; `logits` [rows, V / tp] fp32 is this rank's slice."""
    return _Entropy.apply(logits)


class _Entropy(torch.autograd.Function):
    """H = log Z - m with m = sum_j p_j z_j, of logits z shifted by their maximum; dH / dz_j = p_j (m - z_j)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1)])
        dist.all_reduce(sums, group=group)
        mean = sums[1] / sums[0]
        ctx.save_for_backward(exponentials / sums[0][:, None], shifted, mean)
        return sums[0].log() - mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        probabilities, shifted, mean = ctx.saved_tensors
        return grad[:, None] * probabilities * (mean[:, None] - shifted)
