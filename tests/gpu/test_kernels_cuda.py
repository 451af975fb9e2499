"""The Triton kernels in bf16 against fp64, beside the error of the same formulas in torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adapters.megatron import elementwise, rotary

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16, FP64 = torch.bfloat16, torch.float64
Formula = Callable[..., Tensor]


def kernels(name: str) -> Formula:
    from adapters.megatron.joined import _Joined
    from adapters.megatron.kernels import gating, norm, rotation

    return {
        "joined": _Joined.apply,
        "rotated_heads": lambda x, cos, sin: together(rotation.rotated_heads(x, cos, sin, num_heads=6, num_kv_heads=2)),
        "rms_norm": norm.rms_norm,
        "rotate": rotation.rotate,
        "gated": gating.gated,
        "gated_halves": gating.gated_halves,
    }[name]


def value_and_gradients(formula: Formula, inputs: list[Tensor], rest: list[object], dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of `inputs`, in fp64; the incoming gradient is the same for every dtype."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    out = formula(*leaves, *rest)
    upstream = torch.randn(out.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(BF16)
    out.backward(upstream.to(dtype))
    return [x.detach().double() for x in (out, *(leaf.grad for leaf in leaves))]


def together(heads: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([x * (i + 1) for i, x in enumerate(heads)], 1)


def heads_by_the_book(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = x.unflatten(1, (10, 128)).split([6, 2, 2], 1)
    return together((elementwise.rotate(q, cos, sin), elementwise.rotate(k, cos, sin), v))


def products_by_the_book(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([x @ weight.T for weight in weights], -1)


def reference(name: str, monkeypatch: pytest.MonkeyPatch) -> Formula:
    """torch's own operations, also where the kernels would run."""
    monkeypatch.setattr(elementwise, "is_fused", lambda x: False)
    own = {"rotated_heads": heads_by_the_book, "joined": products_by_the_book}
    return own[name] if name in own else getattr(elementwise, name)


def case(name: str, rows: int) -> tuple[list[Tensor], list[object]]:
    """Inputs with gradients, rounded to bf16, and the other arguments."""
    generator = torch.Generator(DEVICE).manual_seed(rows)

    def noise(*shape: int) -> Tensor:
        return (2 * torch.randn(*shape, device=DEVICE, generator=generator)).to(BF16)

    if name == "rms_norm":
        return [noise(rows, 2048), (1 + noise(2048) / 8).to(BF16)], [1e-6]
    if name == "joined":
        return [noise(rows, 64), noise(48, 64), noise(16, 64), noise(24, 64)], []
    if name in ("rotate", "rotated_heads"):
        positions = torch.randint(0, 60000, (rows,), device=DEVICE, generator=generator)
        x = noise(rows, 12, 128) if name == "rotate" else noise(rows, 10 * 128)
        return [x], [*rotary.rotary_embedding(positions, head_dim=128, theta=1e6, dtype=BF16)]
    if name == "gated":
        return [noise(rows, 5632), noise(rows, 5632)], []
    return [noise(rows, 2 * 1000)], []


def test_the_norm_rounds_where_vllms_does() -> None:
    """Once, after the weight: nearly every value is that of the engine's kernel."""
    import vllm._custom_ops  # noqa: F401  registers the operators

    [x, weight], [eps] = case("rms_norm", 300)
    theirs = torch.empty_like(x)
    torch.ops._C.rms_norm(theirs, x, weight, eps)
    wide = x.float()
    twice = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(BF16)
    shares = [float((each != theirs).float().mean()) for each in (elementwise.rms_norm(x, weight, eps), twice)]
    print(f"differing: once {shares[0]:.1e}, twice {shares[1]:.1e}")
    assert shares[0] < 0.01 < 0.1 < shares[1]


@pytest.mark.parametrize("rows", [1, 37, 3000])
@pytest.mark.parametrize("name", ["rms_norm", "rotate", "rotated_heads", "gated", "gated_halves", "joined"])
def test_kernel_is_as_near_to_fp64_as_torch(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients: mean error at most 1.2, largest at most 2 times that of torch's operations in bf16. Of an
    input moved by 5 % a value or gradient is far outside."""
    inputs, rest = case(name, rows)
    formula = reference(name, monkeypatch)
    exact, peer = (value_and_gradients(formula, inputs, rest, dtype) for dtype in (FP64, BF16))
    own = value_and_gradients(kernels(name), inputs, rest, BF16)
    moved = value_and_gradients(kernels(name), [1.05 * inputs[0], *inputs[1:]], rest, BF16)
    for index, (want, theirs, ours) in enumerate(zip(exact, peer, own, strict=True)):
        off, bound = (ours - want).abs(), (theirs - want).abs()
        errors = [f"{x:.2e}" for x in (off.mean(), bound.mean(), off.max(), bound.max())]
        print(f"{name} {index}: mean {errors[0]} (torch {errors[1]}), max {errors[2]} (torch {errors[3]})")
        assert off.mean() <= 1.2 * bound.mean() and off.max() <= 2 * bound.max()
    worst = max(float((m - w).abs().mean() / (p - w).abs().mean()) for m, w, p in zip(moved, exact, peer, strict=True))
    assert worst > 3


def test_rows_of_a_slice_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are not contiguous are read right; no row gives no row."""
    wide = torch.randn(50, 2048, device=DEVICE).to(BF16)
    weight = torch.ones(1024, device=DEVICE, dtype=BF16)
    formula = reference("rms_norm", monkeypatch)
    for part in (wide[:, :1024], wide[:0, :1024]):
        off = kernels("rms_norm")(part, weight, 1e-5).double() - formula(part.double(), weight.double(), 1e-5)
        assert len(off) == len(part) and not (off.abs() > 2e-2).any()
    gate, up = wide.chunk(2, -1)
    off = kernels("gated")(gate, up).double() - elementwise.gated(gate.double(), up.double())
    assert off.abs().max() < 0.1 and kernels("gated")(gate[:0], up[:0]).shape == (0, 1024)


def test_rows_by_index() -> None:
    """Exactly the rows that were asked for, of any width, also of more than two dimensions, and zeros for -1."""
    from adapters.megatron.kernels.rows import take_rows

    rows = torch.tensor([3, -1, 0, 3, 6, -1], device=DEVICE)
    for shape in ((7, 4, 33), (7, 5000), (7,)):
        x = torch.randn(shape, device=DEVICE).to(BF16)
        want = torch.stack([x[r] if r >= 0 else torch.zeros_like(x[0]) for r in rows.tolist()])
        assert torch.equal(take_rows(x, rows), want)
    assert take_rows(x, rows[:0]).shape == (0,)
    part = torch.randn(7, 6, 8, device=DEVICE).to(BF16)[:, 2:4]
    assert torch.equal(take_rows(part, rows.clamp(min=0)), part[rows.clamp(min=0)])


class Head(torch.nn.Module):
    """Logits by a weight of any dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def logprobs_by_the_book(states: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """[2, R] log-probs and entropies, whole."""
    logits = states @ weight.T
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature.to(logits.dtype)[:, None]
    every = z.log_softmax(-1)
    return torch.stack([every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)])


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("rows,vocabulary", [(50, 5000), (1, 4096), (33, 96)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_selected_logprobs(rows: int, vocabulary: int, with_entropy: bool) -> None:
    """Values and gradients of chunks: error at most 1.3 (mean) and 2 times (max) plain bf16 torch's; at another
    temperature far outside."""
    from adapters.megatron.kernels.logprob import selected_logprobs

    generator = torch.Generator(DEVICE).manual_seed(0)
    states = torch.randn(rows, 128, device=DEVICE, generator=generator).to(BF16)
    weight = (torch.randn(vocabulary, 128, device=DEVICE, generator=generator) / 4).to(BF16)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE, generator=generator)
    temperature = 0.5 + torch.rand(rows, device=DEVICE, generator=generator)
    upstream = torch.randn(2, rows, device=DEVICE, generator=generator)[: 1 + with_entropy]

    def run(dtype: torch.dtype | None, scale: float = 1.0) -> list[Tensor]:
        x = states.detach().to(dtype or BF16, copy=True).requires_grad_()
        head = Head(weight.detach().to(dtype or BF16, copy=True))
        if dtype is None:
            options = {"chunk_rows": 16, "with_entropy": with_entropy}
            out = selected_logprobs(x, head.weight, head, targets, scale * temperature, **options)
            out = out if with_entropy else out[None]
        else:
            out = logprobs_by_the_book(x, head.weight, targets, temperature)[: 1 + with_entropy]
        (out * upstream).sum().backward()
        return [t.detach().double() for t in (out, x.grad, head.weight.grad)]

    exact, peer, own, moved = run(FP64), run(BF16), run(None), run(None, 1.1)
    for name, want, theirs, ours in zip(("out", "states", "weight"), exact, peer, own, strict=True):
        off, bound = (ours - want).abs(), (theirs - want).abs()
        errors = [f"{x:.2e}" for x in (off.mean(), bound.mean(), off.max(), bound.max())]
        print(f"{name}: mean {errors[0]} (torch {errors[1]}), max {errors[2]} (torch {errors[3]})")
        assert off.mean() <= 1.3 * bound.mean() and off.max() <= 2 * bound.max()
    assert (moved[0] - exact[0]).abs().mean() > 10 * (peer[0] - exact[0]).abs().mean()


def moe(dtype: torch.dtype) -> torch.nn.Module:
    """One layer of 16 experts, 4 of them for each token, with the same weights in every dtype."""
    from adapters.megatron.moe import MoE, moe_config
    from adapters.megatron.parallel import transformer_config

    options = moe_config(num_experts=16, top_k=4, width=96, dispatcher="alltoall", dtype=dtype)
    shape = {"num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 96, "num_attention_heads": 1}
    layer = MoE(transformer_config(dtype=dtype, gated_linear_unit=True, **shape, **options)).to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(3)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape, device=DEVICE, generator=generator) / 8
        parameter.data.copy_(noise.to(BF16))
    return layer


@pytest.mark.usefixtures("megatron")
def test_experts_without_a_dispatcher() -> None:
    """Values and all gradients: as near to fp32 with Megatron's dispatcher as bf16 with it; given experts are taken."""
    generator = torch.Generator(DEVICE).manual_seed(4)
    states = torch.randn(300, 128, device=DEVICE, generator=generator).to(BF16)
    upstream = torch.randn(300, 128, device=DEVICE, generator=generator).to(BF16)
    chosen = torch.stack([torch.randperm(15, generator=torch.Generator().manual_seed(i))[:4] for i in range(300)])
    chosen = chosen.sort(-1).values.to(DEVICE)  # nobody takes expert 15

    def run(dtype: torch.dtype, way: str, experts: Tensor = chosen) -> list[Tensor]:
        layer = moe(dtype)
        x = states.detach().to(dtype, copy=True).requires_grad_()
        probabilities, choice, _ = layer.gate(x, experts)
        if way == "here":
            out = layer._run_here(x, choice, probabilities, experts)
        else:
            out = layer._run_dispatched(x, choice, probabilities)
        out.backward(upstream.to(dtype))
        return [t.detach().double() for t in (out, x.grad, *(p.grad for p in layer.parameters()))]

    exact, peer = (run(dtype, "dispatched") for dtype in (torch.float32, BF16))
    own, other = run(BF16, "here"), run(BF16, "here", chosen.roll(1, 0))
    for index, (want, theirs, ours) in enumerate(zip(exact, peer, own, strict=True)):
        off, bound = (ours - want).abs(), (theirs - want).abs()
        errors = [f"{x:.2e}" for x in (off.mean(), bound.mean(), off.max(), bound.max())]
        print(f"{index}: mean {errors[0]} (dispatched {errors[1]}), max {errors[2]} (dispatched {errors[3]})")
        assert off.mean() <= 1.2 * bound.mean() and off.max() <= 2 * bound.max()
    assert (other[0] - exact[0]).abs().mean() > 10 * (peer[0] - exact[0]).abs().mean()
