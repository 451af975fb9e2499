"""The training model against plain PyTorch: logits and gradients, at full depth and with mixed depths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from providers.ouro.config import OuroConfig
from tests.tiny import write_ouro
from tests.unit.ouro import reference

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = (1, 2, 13, 5, 9, 7, 3)
PROMPTS = (1, 1, 4, 2, 1, 6, 2)
LOOPS = 4
TEMPERATURE = 0.7


def report(what: str, got: Tensor, want: Tensor, *, bound: float, why: str) -> None:
    """Prints the difference relative to the largest wanted value, and fails above the bound."""
    difference = (got.detach().double() - want.detach().double()).abs().flatten()
    scale = float(want.detach().double().abs().max())
    worst, mean = float(difference.max()) / scale, float(difference.mean()) / scale
    first = [f"{x:.1e}" for x in difference[:5].tolist()]
    print(f"{what}: max {worst:.2e} mean {mean:.2e} of {scale:.2e}, count {difference.numel()}, first {first}")
    assert worst <= bound, f"{what}: {worst:.2e} > {bound:.0e} ({why})"


def packed(*, mixed: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, boundaries and depths: prompts at full depth, generated tokens at random depths if mixed."""
    generator = torch.Generator().manual_seed(seed)
    depths = []
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        depth = torch.full((length,), LOOPS)
        if mixed:
            depth[prompt:] = torch.randint(1, LOOPS + 1, (length - prompt,), generator=generator)
        depths.append(depth)
    tokens = torch.randint(0, 256, (sum(LENGTHS),), generator=generator)
    return tokens, torch.tensor((0, *LENGTHS)).cumsum(0), torch.cat(depths)


def load(path: Path, *, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """The model with its weights, the weights, and the config as parsed."""
    from providers.ouro.model import build

    hf = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    model = build(OuroConfig.from_hf(hf), dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model, weights, hf


def reference_logits(weights: dict[str, Tensor], hf: dict[str, Any], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, boundaries, depths = batch
    spans = list(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True))
    return torch.cat([reference.logits(weights, hf, tokens[a:b].tolist(), depths[a:b].tolist()) for a, b in spans])


def score(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.fixture(scope="module")
def cases(tiny_ouro: Path) -> dict[bool, dict[str, Any]]:
    """The oracle, once per kind of depth: logits and gradients in fp64, and the plain reference's own fp32 error."""
    hf = json.loads((tiny_ouro / "config.json").read_text())
    stored = load_file(tiny_ouro / "model.safetensors")
    result = {}
    for mixed in (False, True):
        batch = packed(mixed=mixed)
        weight = torch.randn(len(batch[0]), generator=torch.Generator().manual_seed(5))
        runs = {}
        for dtype in (torch.float64, torch.float32):
            weights = {n: t.to(dtype, copy=True).requires_grad_() for n, t in stored.items()}
            logits = reference_logits(weights, hf, batch)
            (score(logits, batch[0].roll(-1)) * weight.to(dtype)).sum().backward()
            runs[dtype] = {"logits": logits.detach(), "gradients": {n: w.grad for n, w in weights.items()}}
        result[mixed] = {"batch": batch, "weight": weight, "oracle": runs[torch.float64], "fp32": runs[torch.float32]}
    return result


def gradients(model: Any, case: dict[str, Any]) -> dict[str, Tensor | None]:
    tokens, boundaries, depths = case["batch"]
    scores = model(tokens, boundaries, depths, targets=tokens.roll(-1), temperature=TEMPERATURE)
    (scores * case["weight"]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mixed", [False, True], ids=["full", "mixed"])
def test_fp32_equals_plain_pytorch(tiny_ouro: Path, cases: Any, mixed: bool) -> None:
    """Logits and every gradient in fp32 against the fp64 oracle, relative to the largest value of each tensor.

    The bound is 1e-6 or, where fp32 is noisier than that (four loops of three layers: plain PyTorch in fp32 is itself
    1e-6 to 2e-6 off), three times what plain PyTorch in fp32 differs by. That only rounding is left is shown in fp64.
    """
    case = cases[mixed]
    model, _, _ = load(tiny_ouro, dtype=torch.float32)
    tokens, boundaries, depths = case["batch"]
    print("depths", torch.bincount(depths).tolist()[1:])
    with torch.no_grad():
        logits = model(tokens, boundaries, depths)
    want = case["oracle"]["logits"]
    own = float((case["fp32"]["logits"] - want).abs().max() / want.abs().max())
    report("logits", logits, want, bound=max(1e-6, 3 * own), why=f"plain fp32 is {own:.1e} off")
    found, worst, worst_own = gradients(model, case), 0.0, 0.0
    for name, want in case["oracle"]["gradients"].items():
        if "early_exit_gate" in name:
            assert found[name] is None, "the gate is frozen"
            continue
        own = (case["fp32"]["gradients"][name] - want).abs().max() / want.abs().max()
        report(name, found[name], want, bound=max(1e-6, 3 * float(own)), why=f"plain fp32 is {float(own):.1e} off")
        worst = max(worst, float((found[name] - want).abs().max() / want.abs().max()))
        worst_own = max(worst_own, float(own))
    print(f"worst gradient difference {worst:.2e}, of plain PyTorch in fp32 {worst_own:.2e}")


@pytest.mark.parametrize("mixed", [False, True], ids=["full", "mixed"])
def test_fp64_equals_plain_pytorch(tiny_ouro: Path, cases: Any, mixed: bool) -> None:
    """In fp64 the logits and all gradients agree to 1e-12: what remains in fp32 is rounding and nothing else."""
    case = cases[mixed]
    model, _, _ = load(tiny_ouro, dtype=torch.float64)
    tokens, boundaries, depths = case["batch"]
    logits = model(tokens, boundaries, depths)
    report("logits", logits, case["oracle"]["logits"], bound=1e-12, why="fp64 rounding")
    (score(logits, tokens.roll(-1)) * case["weight"]).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            report(name, parameter.grad, case["oracle"]["gradients"][name], bound=1e-12, why="fp64 rounding")


def test_mixed_depths_matter(tiny_ouro: Path, cases: Any) -> None:
    """Replaying at uniform depth is far off, so the equalities above do test the trace."""
    model, _, _ = load(tiny_ouro, dtype=torch.float32)
    tokens, boundaries, _ = cases[True]["batch"]
    with torch.no_grad():
        uniform = model(tokens, boundaries)
    difference = float((uniform - cases[True]["oracle"]["logits"]).abs().max())
    print(f"uniform depth is off by {difference:.2e}")
    assert difference > 1e-2


@pytest.mark.parametrize("mutation", ["keys lost", "rows permuted"])
def test_mutations_are_seen(tiny_ouro: Path, cases: Any, monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    """A token that leaves without its keys, or with another's, changes the logits far beyond the bound."""
    from providers.ouro import model as ouro

    real = ouro.Layer.forward

    def broken(self: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, k, v = real(self, *args)
        return (x, k * 0, v) if mutation == "keys lost" else (x, k.flip(0), v.flip(0))

    monkeypatch.setattr(ouro.Layer, "forward", broken)
    model, _, _ = load(tiny_ouro, dtype=torch.float32)
    tokens, boundaries, depths = cases[True]["batch"]
    with torch.no_grad():
        difference = float((model(tokens, boundaries, depths) - cases[True]["oracle"]["logits"]).abs().max())
    print(f"{mutation}: off by {difference:.2e}")
    assert difference > 1e-4


def test_swapped_tensors_are_seen(tiny_ouro: Path, cases: Any) -> None:
    """Exchanging any two tensors of one shape in a layer moves the logits beyond the bound."""
    model, weights, _ = load(tiny_ouro, dtype=torch.float32)
    tokens, boundaries, depths = cases[True]["batch"]
    layer = "model.layers.1."
    pairs = [
        ("self_attn.q_proj", "self_attn.k_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("input_layernorm", "input_layernorm_2"),
        ("post_attention_layernorm", "post_attention_layernorm_2"),
    ]
    parameters = dict(model.named_parameters())
    for pair in pairs:
        a, b = (f"{layer}{name}.weight" for name in pair)
        with torch.no_grad():
            parameters[a].copy_(weights[b]), parameters[b].copy_(weights[a])
            difference = float((model(tokens, boundaries, depths) - cases[True]["oracle"]["logits"]).abs().max())
            parameters[a].copy_(weights[a]), parameters[b].copy_(weights[b])
        print(f"{pair}: {difference:.2e}")
        assert difference > 1e-5


def test_one_by_one_equals_packed(tiny_ouro: Path, cases: Any) -> None:
    """A sequence's scores do not depend on what it is packed with."""
    model, _, _ = load(tiny_ouro, dtype=torch.float32)
    tokens, boundaries, depths = cases[True]["batch"]
    with torch.no_grad():
        together = model(tokens, boundaries, depths)
        alone = torch.cat(
            [
                model(tokens[a:b], torch.tensor([0, b - a]), depths[a:b])
                for a, b in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True)
            ]
        )
    want = cases[True]["oracle"]["logits"]
    own = float((cases[True]["fp32"]["logits"] - want).abs().max() / want.abs().max())
    report("alone", alone, together, bound=max(1e-6, 3 * own), why=f"other shapes round differently; fp32 is {own:.1e}")


def test_recompute_changes_nothing(tiny_ouro: Path, cases: Any) -> None:
    """Recomputing each (loop, layer) gives the same gradients bit for bit, running every layer call twice."""
    plain = gradients(load(tiny_ouro, dtype=torch.float32)[0], cases[True])
    model, _, _ = load(tiny_ouro, dtype=torch.float32, recompute=True)
    calls, fires = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    model.model.layers.get_submodule("0").input_layernorm.weight.register_post_accumulate_grad_hook(
        lambda _: fires.append(1)
    )
    again = gradients(model, cases[True])
    trained = [name for name, grad in plain.items() if grad is not None]
    assert len(trained) == len(plain) - 2 and all(torch.equal(again[name], plain[name]) for name in trained)
    assert (len(calls), len(fires)) == (2 * LOOPS * 3, 1), "one gradient hook a backward, whatever the loop count"


def test_grouped_query_heads(tmp_path: Path) -> None:
    """Fewer key/value heads than query heads: each serves its group."""
    path = write_ouro(tmp_path, num_key_value_heads=2)
    model, weights, hf = load(path, dtype=torch.float64)
    batch = packed(mixed=True, seed=3)
    with torch.no_grad():
        want = reference_logits({n: t.double() for n, t in weights.items()}, hf, batch)
        report("grouped", model(*batch), want, bound=1e-12, why="fp64 rounding")


def test_rows_and_chunks(tiny_ouro: Path, cases: Any) -> None:
    """Scores at some rows, in chunks, with a temperature per row, are those of the whole matrix."""
    model, _, _ = load(tiny_ouro, dtype=torch.float32, logprob_chunk_rows=7)
    tokens, boundaries, depths = cases[True]["batch"]
    rows = torch.tensor([0, 2, 3, 9, 16, 20, 21, 22, 38, 39])
    temperature = torch.linspace(0.5, 1.5, len(rows))
    with torch.no_grad():
        whole = model(tokens, boundaries, depths)[rows] / temperature[:, None]
        want = whole.log_softmax(-1).gather(1, tokens[rows][:, None])[:, 0]
        got = model(tokens, boundaries, depths, rows=rows, targets=tokens[rows], temperature=temperature)
        nothing = model(tokens, boundaries, depths, rows=rows[:0], targets=rows[:0])
    report("rows", got, want, bound=1e-6, why="another order of the same sums")
    assert nothing.shape == (0,)


@pytest.mark.parametrize(
    ("boundaries", "depths", "words"),
    [
        ([0, 3, 3, 5], None, "expected ascending boundaries"),
        ([0, 5], [4, 4, 0, 1, 5], r"\[\(2, 0\), \(4, 5\)\], expected 1 .. 4"),
        ([0, 5], [4, 4], r"shape \(2,\), expected \(5,\)"),
    ],
)
def test_refuses_what_does_not_fit(tiny_ouro: Path, boundaries: Any, depths: Any, words: str) -> None:
    """Bad boundaries or depths are named with their places."""
    model, _, _ = load(tiny_ouro, dtype=torch.float32)
    trace = None if depths is None else torch.tensor(depths)
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(5, dtype=torch.int64), torch.tensor(boundaries), trace)


def test_unloaded_weights_are_seen(tiny_ouro: Path) -> None:
    """A model nobody loaded computes NaN and not something plausible."""
    from providers.ouro.model import build

    model = build(OuroConfig.from_hf(json.loads((tiny_ouro / "config.json").read_text())), dtype=torch.float32)
    with torch.no_grad():
        assert model(torch.arange(4), torch.tensor([0, 4])).isnan().all()
