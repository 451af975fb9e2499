"""Packed linear weights on CPU: same products as vLLM's own packing, and every bit of the weight comes back."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils

from adapters.hf_convert.blocks import Blocks
from adapters.hf_convert.digest import partial_digest, render_digest, tensor_digest
from adapters.vllm_engine.worker import packed, patches
from adapters.vllm_engine.worker.packed import PackedLinear

ROWS = (1, 2, 3, 5, 8, 17, 33, 64, 65)
SHAPES = ((128, 128), (384, 128), (72, 352), (1, 128), (1024, 512))  # [out, in]; odd ones do not fill oneDNN's blocks


class Layer(torch.nn.Module):
    """What vLLM's dispatch reads and writes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)


@pytest.fixture(autouse=True)
def _patched() -> None:
    patches.pack_linears_readably()
    if not packed.can_pack(torch.float32):
        pytest.skip("torch does not pack float32 on this processor")


def packed_layer(shape: tuple[int, int]) -> tuple[Layer, torch.Tensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    weight.view(-1)[::7] = -0.0  # a product with the identity would lose the sign
    layer = Layer(weight)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer, weight


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_vllms_own_packing(shape: tuple[int, int]) -> None:
    """Bitwise, at every number of rows; and a row's product does not depend on its neighbours."""
    layer, weight = packed_layer(shape)
    handler = _custom_ops.create_onednn_mm(weight.t(), 32)
    x = torch.randn(max(ROWS), shape[1], generator=torch.Generator().manual_seed(1))
    whole = layer.cpu_linear(x, layer.weight, None)
    assert (whole.double() - x.double() @ weight.double().t()).abs().max() < 1e-4
    for rows in ROWS:
        product = layer.cpu_linear(x[:rows], layer.weight, None)
        assert torch.equal(product, _custom_ops.onednn_mm(handler, x[:rows], None)), rows
        assert torch.equal(product, whole[:rows]), rows


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def as_matrix(served: torch.Tensor | Blocks) -> torch.Tensor:
    return served.dense() if isinstance(served, Blocks) else served


@pytest.mark.parametrize("shape", SHAPES)
def test_the_weight_comes_back_bitwise_from_what_is_multiplied_with(shape: tuple[int, int]) -> None:
    """Negative zeros too; and what is read is what oneDNN itself unpacks."""
    layer, weight = packed_layer(shape)
    assert layer.weight.numel() == 0
    assert same_bits(layer.cpu_linear.packed.to_dense(), weight)
    assert same_bits(as_matrix(layer.cpu_linear.served()), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_another_weight_is_multiplied_with_once_it_is_loaded(shape: tuple[int, int]) -> None:
    """As if it had been packed anew, at every number of rows: whether it was written in place or not."""
    layer, _ = packed_layer(shape)
    before = layer.cpu_linear.served()
    other = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    other.view(-1)[::11] = -0.0
    layer.weight = torch.nn.Parameter(other.clone(), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert same_bits(layer.cpu_linear.packed.to_dense(), other)
    assert same_bits(as_matrix(layer.cpu_linear.served()), other)
    if isinstance(before, Blocks):  # the memory is the same
        assert same_bits(before.dense(), other)
    fresh = PackedLinear(other)
    x = torch.randn(max(ROWS), shape[1], generator=torch.Generator().manual_seed(1))
    for rows in ROWS:
        product = layer.cpu_linear(x[:rows], layer.weight, None)
        assert torch.equal(product, fresh(x[:rows], layer.weight, None)), rows
        assert torch.equal(product, _custom_ops.onednn_mm(_custom_ops.create_onednn_mm(other.t(), 32), x[:rows], None))


def test_one_element_changed_in_packed_memory_is_one_changed_weight() -> None:
    """What is digested is the memory that products come from: a change there shows in both, at the same place."""
    layer, weight = packed_layer((384, 128))
    served = layer.cpu_linear.served()
    if not isinstance(served, Blocks):
        pytest.skip("torch packs float32 in another layout on this processor")
    rows = served.memory.shape[2]
    served.memory[200 // rows, 7, 200 % rows] = 3.0
    changed = weight.clone()
    changed[200, 7] = 3.0
    assert same_bits(served.dense(), changed)
    assert render_digest(partial_digest(served, shape=(384, 128))) == tensor_digest(changed) != tensor_digest(weight)
    assert torch.equal(layer.cpu_linear(torch.eye(128), layer.weight, None).t(), changed + 0.0)


def test_a_layout_is_used_only_if_it_is_known() -> None:
    """Padded rows, and 16-bit weights, which are packed in pairs, are left to oneDNN."""
    if packed._row_blocks((384, 128), torch.float32) is None:
        pytest.skip("torch packs float32 in another layout on this processor")
    assert packed._row_blocks((72, 352), torch.float32) is None
    assert packed._row_blocks((384, 128), torch.bfloat16) is None
    layer, _ = packed_layer((384, 128))
    wider = torch.randn(512, 128)
    layer.cpu_linear.load(wider)  # another shape than the memory has room for
    assert torch.equal(as_matrix(layer.cpu_linear.served()), wider)


def test_a_bias_is_added() -> None:
    layer, weight = packed_layer((384, 128))
    x, bias = torch.ones(3, 128), torch.arange(384.0)
    expected = x.double() @ weight.double().t() + bias.double()
    assert (layer.cpu_linear(x, layer.weight, bias).double() - expected).abs().max() < 1e-4
