"""fp8 linear layers: both ways to multiply agree, and a model's logits change only a little."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import WeightFormat
from engine.model import fp8
from engine.model.fp8 import (
    Fp8Experts,
    Fp8Linear,
    quantise_rows,
    reference_matmul,
    replace_experts,
    replace_linears,
)
from tests.kits.checkpoints import COMMON, KINDS, save_checkpoint
from tests.kits.gpu.cuda_forward import check_like_the_hook, loaded_from, logits_of_the_hook, opened
from tests.kits.models.experts import EXPERTS, NUM_EXPERTS, experts_of, tokens

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
    assert (found - expected).norm() < 0.25 * expected.norm()  # weights have three fraction bits


# ------------------------------------------------------------ experts


def grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """Replaces `torch._scaled_grouped_mm`: checks the arguments like torch, then multiplies in
    fp32.
    """
    on_meta = [x.to("meta") for x in (a, scale_a, scale_b, offs)]
    whole = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device="meta")
    checked = scaled_grouped_mm(
        on_meta[0], whole, *on_meta[1:3], offs=on_meta[3], out_dtype=out_dtype, use_fast_accum=True
    )
    assert use_fast_accum
    out = torch.empty(checked.shape, dtype=out_dtype)
    for group, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        product = (a[start:end].float() * scale_a[start:end, None]) @ b[group].float()
        out[start:end] = product * scale_b[group]
    return out


scaled_grouped_mm = torch._scaled_grouped_mm
SIZES = {"hidden": 32, "inner": 48}


def token_by_token(experts, x, chosen, shares, flags):
    """Computes the experts' sums from their definition, with weights and activations rounded to
    fp8.
    """

    def product(name, expert, x):
        weight = getattr(experts, name)[expert]
        weight = weight.T if flags.get("is_transposed") else weight
        w, w_scales = quantise_rows(weight)
        y = reference_matmul(*quantise_rows(x), w, w_scales[:, 0])
        return y + getattr(experts, f"{name}_bias")[expert] if flags.get("has_bias") else y

    total = torch.zeros_like(x)
    for token, row in enumerate(x[:, None]):
        for expert, share in zip(chosen[token], shares[token], strict=True):
            if flags.get("has_gate", True):
                y = experts._apply_gate(product("gate_up_proj", expert, row))
            else:
                y = experts.act_fn(product("up_proj", expert, row))
            y = product("down_proj", expert, y)
            if flags.get("has_post_expert_norm"):
                y = experts.post_expert_norm(y)
            total[token] += share * y[0]
    return total


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("flags", EXPERTS.values(), ids=EXPERTS)
def test_experts_equal_products_of_each_token(monkeypatch, flags, grouped):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_mm)
    monkeypatch.setattr(fp8, "can_group", lambda device: grouped)
    experts = experts_of(**SIZES, **flags)
    inputs = [tokens(num_tokens, SIZES["hidden"]) for num_tokens in (1, 2, 40)]
    expected = [token_by_token(experts, *x, flags) for x in inputs]
    exact = [experts(*x) for x in inputs]
    rounded = Fp8Experts(experts)
    assert not list(rounded.experts.parameters(recurse=False))
    slack = 0.04 if grouped else 1e-4  # grouped products are in bf16
    for x, y, z in zip(inputs, expected, exact, strict=True):
        found = rounded(*x)
        assert found.dtype == x[0].dtype
        assert (found - y).norm() <= slack * y.norm()
        assert 0 < (found - z).norm() < 0.15 * z.norm()


def test_experts_no_token_chose_change_nothing():
    experts = experts_of(**SIZES)
    x, _, shares = tokens(4, SIZES["hidden"])
    chosen = torch.tensor([[3, 1, 4]] * 4)
    expected = token_by_token(experts, x, chosen, shares, {})
    torch.testing.assert_close(Fp8Experts(experts)(x, chosen, shares), expected)


def test_groups_need_hopper_or_blackwell(monkeypatch):
    gpu = torch.device("cuda")
    for capability, groups in (((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert fp8.can_group(gpu) == groups
    assert not fp8.can_group(torch.device("cpu"))


def test_experts_of_unfit_sizes_and_routers_stay():
    mixture = nn.Module()
    mixture.router = nn.Linear(32, NUM_EXPERTS)
    mixture.experts = experts_of(**SIZES)
    mixture.odd = experts_of(hidden=32, inner=20)
    mixture.lent = experts_of(**SIZES)
    assert replace_linears(mixture).kept == ("router",)
    found = replace_experts(mixture, {"lent"})
    assert (found.replaced, found.kept) == (("experts",), ("odd", "lent"))
    assert isinstance(mixture.experts, Fp8Experts)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_mixture_in_fp8_is_tried_again_and_serves(tmp_path, kind):
    save_checkpoint(tmp_path / kind, COMMON | KINDS[kind] | {"moe_intermediate_size": 48})
    loaded = loaded_from(tmp_path / kind)
    opened(loaded, weights=WeightFormat.FP8)
    mixtures = [module for module in loaded.model.modules() if isinstance(module, Fp8Experts)]
    assert len(mixtures) == loaded.model.config.num_hidden_layers
    expected = logits_of_the_hook(loaded)
    forward = opened(loaded, weights=WeightFormat.FP8)
    check_like_the_hook(forward, loaded, expected)
    assert not forward.fallbacks
