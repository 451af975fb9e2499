"""Where the order of sums is kept more, or less, strictly than elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.megatron.determinism import OFF, STRICT, WARNS, not_needed, strictly


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize("mode", [OFF, WARNS, STRICT])
def test_the_mode_of_others_comes_back(mode: int) -> None:
    """Inside it is what is asked for, afterwards what it was: also inside of another one, and after an error."""
    torch.set_deterministic_debug_mode(mode)
    with strictly():
        inside = torch.get_deterministic_debug_mode()
        assert inside == (STRICT if mode == WARNS else mode)
        with not_needed():
            assert torch.get_deterministic_debug_mode() == OFF
        assert torch.get_deterministic_debug_mode() == inside
    for change in (strictly, not_needed):
        with pytest.raises(ValueError, match="inside"), change():
            raise ValueError("inside")
        assert torch.get_deterministic_debug_mode() == mode


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("given", [True, False])
def test_a_router_is_that_of_the_deterministic_form(tiny_olmoe: Path, given: bool) -> None:
    """Probabilities, choice and gradients are bitwise those of Megatron's routing with deterministic algorithms on."""
    from tests.unit.olmoe.ranks import make_trainer

    torch.set_deterministic_debug_mode(STRICT)
    router = next(m for m in make_trainer(tiny_olmoe).model.modules() if type(m).__name__ == "Router")
    generator = torch.Generator().manual_seed(3)
    number, top_k = router.config.num_moe_experts, router.config.moe_router_topk
    x = torch.randn(50, router.config.hidden_size, generator=generator)
    towards = torch.randn(50, number, generator=generator)
    experts = torch.rand(50, number, generator=generator).topk(top_k).indices if given else None
    modes: list[int] = []
    routing = router.routing

    def run(strict: bool) -> list[Any]:
        def seen(logits: torch.Tensor) -> Any:
            if strict:
                torch.set_deterministic_debug_mode(STRICT)
            modes.append(torch.get_deterministic_debug_mode())
            return routing(logits)

        router.routing, own = seen, x.clone().requires_grad_()
        probabilities, choice, _ = router(own, experts)
        (probabilities * towards).sum().backward()
        return [probabilities, choice, own.grad]

    here, there = run(False), run(True)
    assert modes == [OFF, STRICT] and torch.get_deterministic_debug_mode() == STRICT
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert (here[1].sum(-1) == top_k).all() and here[2].abs().max() > 0
