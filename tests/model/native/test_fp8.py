"""fp8 linear layers: both ways to multiply agree, and a model with them gives nearly the same
logits.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model import fp8
from engine.model.fp8 import Fp8Linear, quantise_rows, reference_matmul, replace_linears
from tests.kits.checkpoints import COMMON

pytestmark = pytest.mark.torch


def operands(num_rows, out_features=48, in_features=64):
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, in_features) * torch.logspace(-3, 3, num_rows)[:, None]
    return *quantise_rows(x), *quantise_rows(torch.randn(out_features, in_features))


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 40])
def test_the_kernel_and_the_plain_product_agree(num_rows):
    x, x_scales, weight, weight_scales = operands(num_rows)
    expected = reference_matmul(x, x_scales, weight, weight_scales[:, 0])
    found = fp8.scaled_matmul(x, x_scales, weight, weight_scales[:, 0])
    assert (found.shape, found.dtype) == (expected.shape, torch.bfloat16)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=0.02 * 10**-3)


def test_operands_have_the_layout_of_the_kernel(monkeypatch):
    seen = {}

    def record(a, b, **options):
        seen.update(options, a=a, b=b)
        return torch.zeros(a.shape[0], b.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", record)
    x, x_scales, weight, weight_scales = operands(5)
    assert fp8.scaled_matmul(x, x_scales, weight, weight_scales[:, 0]).shape == (5, 48)
    a, b = seen["a"], seen["b"]
    assert a.shape == (16, 64)
    assert a.is_contiguous()
    assert b.shape == (64, 48)
    assert b.stride() == (1, 64)
    assert (seen["scale_a"].shape, seen["scale_b"].shape) == ((16, 1), (1, 48))
    assert seen["scale_a"].is_contiguous()
    assert seen["scale_b"].is_contiguous()
    assert {seen["scale_a"].dtype, seen["scale_b"].dtype} == {torch.float32}
    assert a.view(torch.uint8)[5:].count_nonzero() == 0


@given(exponent=st.integers(-12, 12), num_rows=st.integers(1, 5))
def test_a_row_of_any_size_is_within_half_a_step(exponent, num_rows):
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 32) * 10.0**exponent
    elements, scales = quantise_rows(x)
    error = (elements.float() * scales - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    assert (error <= x.abs() * 2**-4 + largest * 2**-10 + 1e-14).all()


def test_rows_of_zeros_stay_zeros():
    elements, scales = quantise_rows(torch.zeros(2, 16))
    assert not elements.float().any()
    assert scales.isfinite().all()


def test_a_token_has_the_same_result_alone_and_in_a_batch():
    layer = Fp8Linear.of(nn.Linear(64, 32))
    x = torch.randn(7, 64)
    torch.testing.assert_close(layer(x)[3:4], layer(x[3:4]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_shape_dtype_and_bias(bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=bias, dtype=dtype)
    layer = Fp8Linear.of(linear)
    x = torch.randn(2, 3, 64, dtype=dtype)
    found, expected = layer(x), linear(x)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert (found - expected).float().norm() < 0.05 * expected.float().norm()
    assert layer.weight.element_size() == 1


def test_all_layers_but_the_last_and_unfit_ones_are_replaced():
    model = nn.ModuleDict(
        {
            "block": nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 20)),
            "lm_head": nn.Linear(32, 64),
        }
    )
    assert replace_linears(model) == (("block.0",), ("block.2", "lm_head"))
    assert isinstance(model["block"][0], Fp8Linear)
    assert type(model["lm_head"]) is nn.Linear
    assert replace_linears(model, skip=()) == (("lm_head",), ("block.2",))


def test_a_model_with_fp8_weights_gives_nearly_the_same_logits():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**COMMON)).eval()
    ids = torch.tensor([[5, 3, 8, 7, 2, 9, 4]])
    with torch.inference_mode():
        expected = model(ids).logits
        found_names = replace_linears(model)
        found = model(ids).logits
    assert found_names.kept == ("lm_head",)
    assert len(found_names.replaced) == 7 * model.config.num_hidden_layers
    assert (found - expected).norm() < 0.25 * expected.norm()  # three bits of 32 random sizes
