"""Packed linear weights on CPU: same products as vLLM's own packing, and every bit of the weight comes back."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils

from adapters.vllm_engine import patches

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
    if not patches.can_pack(torch.float32):
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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_weight_comes_back_bitwise_from_what_is_multiplied_with(shape: tuple[int, int]) -> None:
    """Negative zeros too; and one element changed in the packed memory is one element changed in what is read."""
    layer, weight = packed_layer(shape)
    assert layer.weight.numel() == 0
    packed = layer.cpu_linear.packed
    assert torch.equal(packed.to_dense().view(torch.int32), weight.view(torch.int32))
    changed = weight.clone()
    changed[-1, -1] += 1
    layer.cpu_linear.packed = torch.ops.mkldnn._reorder_linear_weight(changed)
    x = torch.eye(shape[1])
    assert torch.equal(layer.cpu_linear(x, layer.weight, None).t(), changed)
    assert (layer.cpu_linear.packed.to_dense() != weight).sum() == 1


def test_a_bias_is_added() -> None:
    layer, weight = packed_layer((384, 128))
    x, bias = torch.ones(3, 128), torch.arange(384.0)
    expected = x.double() @ weight.double().t() + bias.double()
    assert (layer.cpu_linear(x, layer.weight, bias).double() - expected).abs().max() < 1e-4
