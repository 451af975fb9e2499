"""The CPU runtime: what it changes while installed, that it can be taken back, and that a moved name is an error."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from adapters.megatron import cpu_runtime


@pytest.fixture
def installed() -> Iterator[None]:
    assert cpu_runtime.install() is not torch.cuda.is_available()
    yield
    cpu_runtime.uninstall()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device nothing is installed")
@pytest.mark.usefixtures("installed")
def test_cuda_means_cpu() -> None:
    """Literals, `.cuda()`, streams and random states that Megatron asks of CUDA are served by the CPU."""
    assert torch.zeros(2, device="cuda").device == torch.empty(1, device=torch.device("cuda")).device
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor and tensor.to("cuda").device.type == "cpu"
    assert tensor.type() == "torch.cuda.FloatTensor"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    assert not torch.cuda.is_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device nothing is installed")
def test_everything_is_taken_back() -> None:
    """After `uninstall` torch is as it was: other code in the process sees no stand-in."""
    names = ("current_device", "Stream", "get_rng_state", "manual_seed", "device_count")
    before = {name: getattr(torch.cuda, name) for name in names}
    cpu_runtime.install()
    cpu_runtime.install()
    assert torch.cuda.current_device is not before["current_device"]
    cpu_runtime.uninstall()
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_a_moved_name_is_an_error() -> None:
    """A patch whose target is gone says which, and under which Megatron-Core."""
    with pytest.raises(ImportError, match=r"megatron.moved.gone does not exist in Megatron-Core \d+\.\d+"):
        cpu_runtime._replace(types.ModuleType("megatron.moved"), gone=None)


def test_nothing_happens_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CUDA device install() changes nothing and says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    assert cpu_runtime.install() is False and torch.cuda.current_device is before
