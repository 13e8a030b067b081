"""Models' own code gives the same bits in any batch and any chunking, or loading reports that it
does not.
"""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.config import WeightFormat
from engine.model.memory import one_torch_thread
from engine.model.native.invariant import InvariantProducts
from engine.model.native.linear import PackedLinear
from engine.model.native.matrix import Team
from engine.model.runner import TorchRunner
from engine.native.library import library
from engine.worker.batch import Row
from tests.kits.checkpoints import OWN_CODE, save_checkpoint
from tests.kits.models.sequences import logits_in_chunks
from tests.kits.models.served import check_equals_generate

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

ELEMENTWISE = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softplus": functional.softplus,
    "cos": torch.cos,
    "in place": lambda x: x.clone().sigmoid_(),
}
FORMS = (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8)


class Own(nn.Module):
    """A module whose weights code outside the module uses in products."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(7, 50), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(3, 7, 50), requires_grad=False)


@pytest.fixture
def products():
    team = Team(library(), 2)
    made = InvariantProducts(Own(), team)
    yield made
    team.close()


@pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_an_element_has_the_same_bits_at_every_index(products, function):
    x = torch.randn(90, 7)
    expected = function(x)
    with one_torch_thread(), products.active():
        whole = function(x)
        torch.testing.assert_close(whole, expected)
        for start, count in ((0, 1), (1, 2), (7, 60), (89, 1)):
            part = slice(start, start + count)
            assert torch.equal(function(x[part]), whole[part])
        assert torch.equal(function(x.T).T, whole)
        assert torch.equal(function(x[:, 2:5]), whole[:, 2:5])
    assert torch.equal(function(x), expected)


def test_element_wise_functions_accept_torchs_arguments(products):
    with products.active():
        assert torch.sigmoid(torch.tensor([1, 2])).dtype == torch.float32
        assert torch.exp(torch.zeros(0)).shape == (0,)
        assert torch.exp(torch.tensor(0.0)).shape == ()
        assert torch.tanh(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def products_of(x, own):
    """Returns the ways in which models multiply by a matrix, or by experts in one parameter."""
    bias = torch.arange(7.0)
    by_expert = [x.matmul(matrix.T) for matrix in own.experts]
    return {
        "linear": functional.linear(x, own.matrix),
        "bias": functional.linear(x, own.matrix, bias),
        "cast": functional.linear(x, own.matrix.type(torch.float32).float()),
        "matmul": x[None].matmul(own.matrix.T)[0],
        "slice": functional.linear(x, own.matrix[2:5]),
        "experts": torch.cat(by_expert, 1),
        "batched": torch.bmm(x.expand(3, -1, -1), own.experts.mT).transpose(0, 1),
    }


def test_a_row_of_a_product_with_a_weight_has_the_same_bits_in_any_batch():
    own = Own()
    team = Team(library(), 1)
    products = InvariantProducts(own, team)
    x = torch.randn(40, 50)
    expected = products_of(x, own)
    with one_torch_thread(), products.active():
        whole = products_of(x, own)
        for start, count in ((0, 1), (3, 5), (11, 29)):
            part = slice(start, start + count)
            for name, found in products_of(x[part], own).items():
                assert torch.equal(found, whole[name][part]), name
    for name, found in whole.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-5)
    team.close()


def test_products_of_other_tensors_are_left_to_torch(products):
    x, y = torch.randn(5, 6), torch.randn(6, 7)
    expected = x @ y
    with products.active():
        assert torch.equal(x @ y, expected)


@pytest.fixture(scope="module", params=OWN_CODE)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / request.param
    save_checkpoint(path, OWN_CODE[request.param])
    return path


def opened(path, weights):
    runner = TorchRunner(path, block_size=4, num_blocks=100, weights=weights)
    runner.open()
    return runner


@pytest.mark.parametrize("weights", FORMS)
def test_a_sequence_has_the_same_bits_in_any_batch_and_chunking(checkpoint, weights):
    runner = opened(checkpoint, weights)
    assert runner.is_batch_invariant
    assert not runner.is_fused
    assert re.fullmatch(r"cpu (amx|avx512|avx2) by-layer", runner.kernels)
    token_ids = [(7 * i * i + 3) % 256 for i in range(50)]
    logits = partial(logits_in_chunks, runner, token_ids, table=range(15), first=lambda i: i % 3)
    whole = logits([50])
    company = [
        Row("b", [5] * 9, 0, [20, 21, 22], None),
        Row("c", [9], 6, [30, 31], None),
        Row("d", [(5 * i) % 256 for i in range(75)], 0, list(range(40, 60)), None),
    ]
    for chunks, others in (
        ([50], company),
        ([1] * 50, []),
        ([1] * 50, company[:2]),
        ([20, 1, 1, 4, 4, 20], []),
        ([33, 4, 1, 4, 1, 4, 3], company),
    ):
        assert torch.equal(logits(chunks, company=others), whole), chunks
    runner.close()


def test_models_with_own_code_equal_generate(checkpoint):
    check_equals_generate(checkpoint)


def test_the_layers_of_gpt2_are_packed(tmp_path):
    save_checkpoint(tmp_path, OWN_CODE["gpt2"])
    runner = opened(tmp_path, WeightFormat.INT8)
    packed = [m for m in runner._forward._loaded.model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 4 * 3 + 1
    assert {matrix.matrix.form for matrix in packed} == {WeightFormat.INT8}
    runner.close()


def test_a_model_whose_bits_depend_on_the_batch_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(InvariantProducts, "active", lambda _: nullcontext())
    save_checkpoint(tmp_path, OWN_CODE["qwen2_moe"])
    runner = opened(tmp_path, WeightFormat.FP32)
    assert not runner.is_batch_invariant
    assert "qwen2_moe: the last bits of an answer depend on what is computed beside it" in (
        caplog.text
    )
    runner.close()
