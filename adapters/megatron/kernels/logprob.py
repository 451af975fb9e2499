"""Selected-token log-probs and entropies from half-precision logits, read once in forward and overwritten in backward.

The reference is `logprobs.selected_logprobs` in torch's own operations, which makes several fp32 copies of a chunk's
logits. Legend: R scored rows, V this rank's slice of the vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from megatron.core import parallel_state
from torch import Tensor

BLOCK = 4096


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk_rows: int,
    with_entropy: bool,
) -> Tensor:
    """As `logprobs.selected_logprobs`, of a head that is `weight` [V, H] and nothing else.

    The head itself is called in forward, because the parameters of a module may have to be waited for.
    """
    found = _Selected.apply(hidden, weight, head, targets, temperature, chunk_rows)
    return found if with_entropy else found[0]


class _Selected(torch.autograd.Function):
    """log p_t = z_t - lse and H = lse - m, with m = sum_j p_j z_j; d log p_t / dz_j = [j = t] - p_j and
    dH / dz_j = p_j (m - z_j)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: Callable[[Tensor], Tensor],
        targets: Tensor,
        temperature: Tensor,
        chunk_rows: int,
    ) -> Tensor:
        targets = targets - len(weight) * parallel_state.get_tensor_model_parallel_rank()
        parts = []
        chunks = (x.split(chunk_rows) for x in (hidden, targets, temperature))
        for rows, wanted, scale in zip(*chunks, strict=True):
            parts.append(_statistics(head(rows), wanted, scale))
        chosen, normaliser, mean = _over_ranks(torch.cat(parts, 1))
        ctx.save_for_backward(hidden, weight, targets, temperature, normaliser, mean)
        ctx.chunk_rows = chunk_rows
        return torch.stack([chosen - normaliser, normaliser - mean])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, normaliser, mean = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        columns = (targets, temperature, normaliser, mean, *grad.unbind(0))
        for start in range(0, len(hidden), ctx.chunk_rows):
            part = slice(start, start + ctx.chunk_rows)
            logits = F.linear(hidden[part], weight)
            _overwrite(logits, *(column[part].contiguous() for column in columns))
            torch.mm(logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(logits.t(), hidden[part])
        return d_hidden, d_weight, None, None, None, None


def _statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """[4, R] fp32 of z = logits / temperature: the largest, sum exp(z - largest), sum exp(z - largest)(z - largest),
    and the target's z, 0 if another rank has it."""
    rows, width = logits.shape
    found = torch.zeros(4, rows, device=logits.device)
    if rows:
        _forward[(rows,)](logits, targets, temperature, *found.unbind(0), width, BLOCK=BLOCK, num_warps=8)
    return found


def _over_ranks(found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's z, log sum exp z and the mean of z, over the whole vocabulary."""
    largest, total, weighted, chosen = found
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        own, largest = largest, largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shift = own - largest
        sums = torch.stack([shift.exp() * total, shift.exp() * (weighted + total * shift), chosen])
        dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
    return chosen, largest + total.log(), largest + weighted / total


def _overwrite(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    normaliser: Tensor,
    mean: Tensor,
    grad_chosen: Tensor,
    grad_entropy: Tensor,
) -> None:
    """Puts the gradient of the logits in their place."""
    rows, width = logits.shape
    _backward[(rows, triton.cdiv(width, BLOCK))](
        logits,
        targets,
        temperature,
        normaliser,
        mean,
        grad_chosen,
        grad_entropy,
        width,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _forward(logits, targets, temperatures, largests, totals, weighteds, chosens, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    temperature = tl.load(temperatures + row)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    chosen = tl.full([], 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits + row * width + column, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        chosen += tl.sum(tl.where(column == target, z, 0.0), axis=0)
        new = tl.maximum(largest, tl.max(z, axis=0))
        # Before the first block the largest is -inf: nothing to carry over, and -inf * 0 is no number.
        shift = tl.where(start == 0, 0.0, largest - new)
        carried = tl.exp(shift)
        exponential = tl.where(inside, tl.exp(z - new), 0.0)
        weighted = carried * (weighted + total * shift) + tl.sum(tl.where(inside, exponential * (z - new), 0.0), axis=0)
        total = carried * total + tl.sum(exponential, axis=0)
        largest = new
    tl.store(largests + row, largest)
    tl.store(totals + row, total)
    tl.store(weighteds + row, weighted)
    tl.store(chosens + row, chosen)


@triton.jit
def _backward(
    logits, targets, temperatures, normalisers, means, grads_chosen, grads_entropy, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    temperature = tl.load(temperatures + row)
    place = logits + row * width + column
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32) / temperature
    probability = tl.exp(z - tl.load(normalisers + row))
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    grad = tl.load(grads_chosen + row) * (hit - probability)
    grad += tl.load(grads_entropy + row) * probability * (tl.load(means + row) - z)
    tl.store(place, (grad / temperature).to(logits.dtype.element_ty), mask=inside)
