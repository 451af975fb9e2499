"""The model over the packed form of its passes, read by the flash kernel on CUDA, against buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.megatron import varlen
from adapters.megatron.attention import sdpa_attention
from adapters.megatron.attention_view import Attention
from tests.unit.megatron_side.test_attention import DEPTHS, causal_by_the_book, depths_of
from tests.unit.ouro.test_model import load

pytestmark = pytest.mark.usefixtures("megatron")
LENGTHS = torch.tensor([7, 1, 23, 3, 12])


def run(path: Path, attention: Attention, depths: Tensor) -> dict[str, Tensor]:
    """Logits and gradients in fp64."""
    model, _, _ = load(path, dtype=torch.float64, attention=attention)
    tokens = torch.randint(0, 256, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(0))
    logits = model(tokens, torch.tensor([0, *LENGTHS.tolist()]).cumsum(0), depths)
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


@pytest.mark.parametrize("kind", DEPTHS)
def test_packed_equals_buckets(tiny_ouro: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fp64 rounding, at every kind of depth; where tokens left between others, their kept keys are needed."""
    monkeypatch.setattr(varlen, "_flash", causal_by_the_book)
    depths = depths_of(kind, LENGTHS, torch.Generator().manual_seed(2))
    want, got = (run(tiny_ouro, attention, depths) for attention in (sdpa_attention, varlen.varlen_attention))
    worst = {name: float((got[name] - want[name]).abs().max() / want[name].abs().max()) for name in want}
    name = max(worst, key=lambda each: worst[each])
    print(f"{kind}: {len(worst)} tensors, worst {name} {worst[name]:.1e}")
    assert got.keys() == want.keys() and worst[name] < 1e-12
