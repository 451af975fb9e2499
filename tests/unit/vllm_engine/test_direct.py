"""Writing to served memory is used only if it leaves what vLLM's loader leaves: a model that needs more is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from adapters.hf_convert.digest import tensor_digest
from adapters.vllm_engine.worker.direct import is_same_as, load_directly
from adapters.vllm_engine.worker.model_interface import LiveTensor
from adapters.vllm_engine.worker.packed import PackedWhenUsed
from adapters.vllm_engine.worker.readback import served_state

PARTS = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}


class Fused(nn.Module):
    """q, k and v in one parameter; a norm; the second half of a table, as the second of two workers has it."""

    def __init__(self, places: dict[str, tuple[int, int]] = PARTS, *, copies: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(8, 5), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.table = nn.Parameter(torch.zeros(3, 5), requires_grad=False)
        self.register_buffer("frequencies", torch.ones(4))
        self.places, self.copies = places, copies

    def live_tensors(self) -> Iterator[LiveTensor]:
        for name, (start, length) in self.places.items():
            part = self.qkv.detach().narrow(0, start, length)
            yield LiveTensor(name=name, part=part.clone() if self.copies else part, shape=(length, 5))
        yield LiveTensor(name="norm", part=self.norm.detach(), shape=(5,))
        yield LiveTensor(name="table", part=self.table.detach(), shape=(6, 5), dim=0, offset=3)


def loader(model: Fused, also: Callable[[], object] = lambda: None) -> Callable[..., None]:
    """What vLLM would do: every tensor to its place, and `also`."""

    def load(tensors: object) -> None:
        given = dict(tensors)  # type: ignore[call-overload]
        model.qkv.copy_(torch.cat([given[name] for name in PARTS]))
        model.norm.copy_(given["norm"])
        model.table.copy_(given["table"][3:])
        also()

    return load


def is_same(model: Fused, load: Callable[..., None]) -> bool:
    return is_same_as(load, model, dtype=torch.float32, device=torch.device("cpu"))  # type: ignore[arg-type]


def test_a_model_that_is_its_tensors_is_written_directly() -> None:
    model = Fused()
    assert is_same(model, loader(model))
    given = {live.name: torch.randn(live.shape) for live in model.live_tensors()}
    load_directly(model, model.live_tensors(), given.items())  # type: ignore[arg-type]
    written = dict(served_state(model))
    model_by_vllm = Fused()
    loader(model_by_vllm)(given.items())
    assert {n: tensor_digest(t) for n, t in written.items()} == {  # type: ignore[arg-type]
        n: tensor_digest(t)  # type: ignore[arg-type]
        for n, t in served_state(model_by_vllm)
    }


def test_parts_at_other_places_than_vllms_are_noticed() -> None:
    """Also of equal shape, where neither shapes nor sizes tell."""
    model = Fused({"q": (0, 4), "k": (6, 2), "v": (4, 2)})
    assert not is_same(model, loader(model))


@pytest.mark.parametrize("where", ["buffer", "attribute", "parameter"])
def test_what_a_load_derives_from_weights_is_noticed(where: str) -> None:
    model = Fused()
    vars(model)["scaled"] = torch.zeros(5)
    name = {"buffer": "frequencies", "attribute": "scaled", "parameter": "norm"}[where]
    assert not is_same(model, loader(model, lambda: getattr(model, name).add_(model.qkv.sum())))


def test_places_that_are_copies_are_noticed() -> None:
    model = Fused(copies=True)
    assert not is_same(model, loader(model))


@pytest.mark.parametrize("names", [["q", "k", "v", "norm"], ["q", "k", "v", "norm", "table", "x"], ["q", "q"]])
def test_a_version_that_is_not_whole_is_an_error(names: list[str]) -> None:
    model = Fused()
    shapes = {live.name: live.shape for live in model.live_tensors()}
    given = [(name, torch.zeros(shapes.get(name, (5,)))) for name in names]
    with pytest.raises(ValueError, match="missing|lacks"):
        load_directly(model, model.live_tensors(), given)  # type: ignore[arg-type]


def test_a_packed_embedding_is_packed_again_once_it_was_written() -> None:
    """vLLM packs what a head may be tied to; nobody tells it of new weights."""
    model = Fused()
    embedding = PackedWhenUsed()
    vars(model)["cpu_linear"] = embedding
    x = torch.randn(2, 5)
    assert not embedding(x, model.table, None).any()
    given = {live.name: torch.randn(live.shape) for live in model.live_tensors()}
    load_directly(model, model.live_tensors(), given.items())  # type: ignore[arg-type]
    torch.testing.assert_close(embedding(x, model.table, None), x @ given["table"][3:].t())
