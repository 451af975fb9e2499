"""Training on CUDA: the attention kernel against fp64, fused Adam against fp64, and updates that repeat bitwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.megatron.attention import replay_layout, sdpa_attention
from adapters.megatron.attention_view import Attention, AttentionView
from adapters.megatron.optimizer import Adam
from adapters.megatron.packing import TrainSample
from adapters.megatron.routing import RouterSettings
from adapters.megatron.trainer import Trainer
from adapters.megatron.varlen import varlen_attention
from tests.unit.megatron_side.samples import make_samples, make_trainer, tensors_of
from tests.unit.megatron_side.test_attention import DEPTHS, depths_of
from tests.unit.olmoe import ranks

pytestmark = pytest.mark.gpu
LENGTHS = (300, 1, 77, 512, 1, 130)
BF16, FP64 = torch.bfloat16, torch.float64


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As `runtime.initialize` leaves it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def views(kind: str, attention: Attention) -> tuple[AttentionView, ...]:
    lengths = torch.tensor(LENGTHS)
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    depths = depths_of(kind, lengths, torch.Generator().manual_seed(3))
    return replay_layout(boundaries, depths, max_passes=4, device="cuda", attention=attention).views


def value_and_gradients(
    attention: Attention, view: AttentionView, inputs: list[Tensor], weights: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in inputs)
    out = attention(q, k, v, view)
    (out * weights.to(dtype)).sum().backward()
    return [x.detach().double() for x in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("kind", DEPTHS)
def test_varlen_is_as_near_to_fp64_as_sdpa(kind: str, num_kv_heads: int, width: int) -> None:
    """bf16 values and gradients of every pass: error at most 2 (mean) and 3 times (max) that of SDPA in bf16; with a
    boundary in the wrong place ten times as much and more."""
    generator, total = torch.Generator("cuda").manual_seed(0), sum(LENGTHS)
    for view, dense in zip(views(kind, varlen_attention), views(kind, sdpa_attention), strict=True):
        shapes = (view.num_queries, 4), (total, num_kv_heads), (total, num_kv_heads)
        inputs = [torch.randn(*s, width, device="cuda", generator=generator).to(BF16) for s in shapes]
        weights = torch.randn(view.num_queries, 4 * width, device="cuda", generator=generator).to(BF16)
        exact = value_and_gradients(sdpa_attention, dense, inputs, weights, FP64)
        peer = value_and_gradients(sdpa_attention, dense, inputs, weights, BF16)
        own = value_and_gradients(varlen_attention, view, inputs, weights, BF16)
        for name, want, theirs, ours in zip(("out", "dq", "dk", "dv"), exact, peer, own, strict=True):
            off, bound = (ours - want).abs(), (theirs - want).abs()
            print(
                f"{kind} {view.num_queries} {name}: varlen max {off.max():.1e} mean {off.mean():.1e}, "
                f"sdpa max {bound.max():.1e} mean {bound.mean():.1e} of {want.abs().mean():.1e}"
            )
            assert off.mean() <= 2 * bound.mean() and off.max() <= 3 * bound.max()
        if len(view.packed.cu_seqlens) > 2 and view.packed.longest > 1:
            moved = view.packed.cu_seqlens.clone()
            moved[1] -= 1
            longest = view.packed.longest + 1  # the one behind may be the longest
            wrong = replace(view, packed=replace(view.packed, cu_seqlens=moved, longest=longest))
            if int(moved[1]) > 0:
                broken = value_and_gradients(varlen_attention, wrong, inputs, weights, BF16)
                assert (broken[0] - exact[0]).abs().max() > 10 * (peer[0] - exact[0]).abs().max()


@pytest.mark.usefixtures("deterministic")
def test_attention_gradients_repeat_bitwise() -> None:
    """Many blocks of keys add to each query's gradient; their order is fixed where deterministic algorithms warn."""
    boundaries = torch.tensor([0, 2048, 3000, 5048])
    view = replay_layout(boundaries, None, max_passes=1, device="cuda", attention=varlen_attention).views[0]
    torch.manual_seed(0)
    inputs = [torch.randn(5048, 8, 128, device="cuda") for _ in range(3)]
    weights = torch.randn(5048, 1024, device="cuda")
    first, *others = (value_and_gradients(varlen_attention, view, inputs, weights, BF16) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def adam_error(device: str, dtype: torch.dtype, *, weight_decay: float = 0.1) -> Tensor:
    """Parameters after three steps against the formula in fp64, largest difference."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((3, 7), (1,), (1000, 33))]
    exact = [(p.double().cpu(), 0.0, 0.0) for p in params]
    optimizer = Adam(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 4):
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad.to(device, dtype)
            value, mean, square = exact[i]
            mean, square = 0.9 * mean + 0.1 * grad.double(), 0.95 * square + 0.05 * grad.double() ** 2
            change = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
            exact[i] = (value * (1 - 1e-2 * 0.1) - 1e-2 * change, mean, square)
        optimizer.step()
    return max((p.double().cpu() - e[0]).abs().max() for p, e in zip(params, exact, strict=True))


def test_fused_adam() -> None:
    """At most twice the CPU's fp32 error from the formula in fp64; without weight decay far more."""
    fused, cpu = adam_error("cuda", torch.float32), adam_error("cpu", torch.float32)
    print(f"fused {fused:.1e}, cpu {cpu:.1e}")
    assert fused <= 2 * cpu
    assert adam_error("cuda", torch.float32, weight_decay=0.0) > 100 * cpu


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("traced", [True, False])
def test_updates_repeat_bitwise(tiny_ouro: Path, traced: bool) -> None:
    samples = make_samples(6, traced=traced, longest=400)
    expect_repeatable(lambda: make_trainer(tiny_ouro, dtype=BF16, tokens_per_microbatch=1000), samples)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("traced", [True, False])
def test_updates_of_experts_repeat_bitwise(tiny_olmoe: Path, traced: bool) -> None:
    """Given experts, and those that the routers choose, whose writes are in no order."""
    samples = make_samples(6, traced=False, longest=400)
    if traced:
        chances = torch.rand(6, 800, 2, 8, generator=torch.Generator().manual_seed(2))
        experts = chances.topk(2).indices
        samples = [replace(s, trace=experts[i, : s.num_inputs]) for i, s in enumerate(samples)]
    router = RouterSettings(replay="rollout" if traced else "none")
    options = {"dtype": BF16, "recompute": True, "tokens_per_microbatch": 1000, "router": router}
    expect_repeatable(lambda: ranks.make_trainer(tiny_olmoe, **options), samples)


def expect_repeatable(make: Callable[[], Trainer], samples: list[TrainSample]) -> None:
    """Two trainers of the same checkpoint and samples have the same bits after three updates."""
    runs = []
    for _ in range(2):
        trainer = make()
        losses = [trainer.train(samples)["loss"] for _ in range(3)]
        runs.append((losses, tensors_of(trainer)))
    (losses, first), (again, second) = runs
    different = [name for name in first if not torch.equal(first[name], second[name])]
    print(losses, again, different[:5])
    assert losses == again and len(set(losses)) == 3 and not different
