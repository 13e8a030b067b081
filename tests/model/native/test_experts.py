"""Mixtures of experts over packed weights give the results of the model's own code, in any
batch.
"""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import JetMoeConfig
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts, DbrxFFN
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE, JetMoeParallelExperts

from engine.config import WeightFormat
from engine.model.native import linear
from engine.model.native.experts import (
    PackedExperts,
    PackedGlu,
    PackedRuns,
    holds_experts,
    kind_of_experts,
    router_layers,
)
from engine.model.native.linear import PackedLinear, pack_linears
from engine.model.native.matrix import PackedMatrix, Team, multiply
from engine.native.library import library
from tests.kits.models.experts import (
    EXPERTS,
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    TOP_K,
    experts_of,
    parameter,
    tokens,
)

pytestmark = pytest.mark.torch


@pytest.fixture(params=[1, 2])
def team(request):
    team = Team(library(), request.param)
    yield team
    team.close()


@pytest.mark.parametrize("flags", EXPERTS.values(), ids=EXPERTS)
def test_packed_experts_equal_the_experts(team, flags):
    experts = experts_of(**flags)
    inputs = [tokens(num_tokens) for num_tokens in (1, 2, 40)]
    expected = [experts(*x) for x in inputs]
    packed = PackedExperts(experts, team, WeightFormat.FP32)
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(packed(*x), y, rtol=1e-5, atol=1e-5)


def initialised(module):
    """Gives the module random weights in place of a checkpoint's weights."""
    torch.manual_seed(1)
    for weights in module.parameters():
        nn.init.normal_(weights, std=0.3)
    return module.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("shape", [(1,), (40,), (2, 5)])
def test_packed_experts_of_dbrx_equal_its_own(team, shape):
    config = DbrxFFNConfig(hidden_size=HIDDEN, ffn_hidden_size=INNER, moe_num_experts=NUM_EXPERTS)
    experts = initialised(DbrxExperts(config))
    x, chosen, shares = tokens(math.prod(shape))
    x = x.view(*shape, HIDDEN)
    expected = experts(x if x.ndim > 2 else x[None], chosen, shares).view_as(x)
    assert kind_of_experts(experts) is PackedGlu
    packed = PackedGlu(experts, team, WeightFormat.FP32)
    torch.testing.assert_close(packed(x, chosen, shares), expected, rtol=1e-5, atol=1e-5)
    assert not list(packed.parameters())


@pytest.mark.parametrize("counts", [[3, 0, 7, 1, 9], [0, 0, 0, 0, 1], [5, 0, 0, 0, 0]])
def test_packed_experts_of_jetmoe_equal_its_own(team, counts):
    experts = initialised(JetMoeParallelExperts(NUM_EXPERTS, HIDDEN, INNER))
    x = torch.randn(sum(counts), HIDDEN)
    expected = experts(x, counts)
    assert kind_of_experts(experts) is PackedRuns
    packed = PackedRuns(experts, team, WeightFormat.FP32)
    torch.testing.assert_close(packed(x, counts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "block",
    [
        lambda: DbrxFFN(
            SimpleNamespace(ffn_config=DbrxFFNConfig(hidden_size=HIDDEN, ffn_hidden_size=INNER))
        ),
        lambda: JetMoeMoE(JetMoeConfig(hidden_size=HIDDEN, intermediate_size=INNER)),
    ],
    ids=["dbrx", "jetmoe"],
)
def test_routers_beside_experts_of_any_kind_are_not_quantised(team, block):
    block = initialised(block())
    assert list(router_layers(block)) == [block.router.layer]
    pack_linears(block, team, WeightFormat.INT8)
    assert block.router.layer.matrix.form is WeightFormat.FP32


def test_an_unchosen_expert_changes_nothing(team):
    experts = experts_of()
    x, _, shares = tokens(4)
    chosen = torch.tensor([[3, 1, 4]] * 4)
    expected = experts(x, chosen, shares)
    packed = PackedExperts(experts, team, WeightFormat.FP32)
    torch.testing.assert_close(packed(x, chosen, shares), expected, rtol=1e-5, atol=1e-5)


def test_int8_experts_equal_int8_layers_summed_in_order_of_choice(team):
    experts = experts_of()
    layers = [
        [PackedMatrix(team, w, WeightFormat.INT8) for w in weights]
        for weights in (experts.gate_up_proj, experts.down_proj)
    ]
    packed = PackedExperts(experts, team, WeightFormat.INT8)
    x, chosen, shares = tokens(30)
    for token, row in enumerate(packed(x, chosen, shares)):
        total = torch.zeros(1, HIDDEN)
        for expert, share in zip(chosen[token], shares[token], strict=True):
            gate, up = multiply(x[token : token + 1], layers[0][expert], team).chunk(2, -1)
            total += share * multiply(functional.silu(gate) * up, layers[1][expert], team)
        assert torch.equal(row, total[0])


@pytest.mark.parametrize("form", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_a_token_has_the_same_bits_in_any_batch(team, form):
    packed = PackedExperts(experts_of(), team, form)
    inputs = tokens(90)
    whole = packed(*inputs)
    for start, count in ((0, 1), (1, 2), (7, 60), (89, 1)):
        part = slice(start, start + count)
        assert torch.equal(packed(*(x[part] for x in inputs)), whole[part])


@pytest.mark.parametrize("flags", EXPERTS.values(), ids=EXPERTS)
def test_packing_removes_the_experts_weights(team, flags):
    experts = experts_of(**flags)
    num_weights = sum(p.numel() for p in experts.parameters() if p.ndim == 3)
    packed = PackedExperts(experts, team, WeightFormat.INT8)
    assert [name for name, _ in packed.named_parameters()] == ["experts.post_expert_norm.weight"]
    assert num_weights <= packed.num_bytes < 4 * num_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_are_recognised(dtype):
    assert holds_experts(experts_of().to(dtype))


def test_experts_of_a_quantised_checkpoint_are_not_packed():
    experts = experts_of()
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert not holds_experts(experts)
    replaced = experts_of()
    replaced.forward = lambda *_: None
    assert not holds_experts(replaced)
    assert not holds_experts(nn.Linear(2, 2))


class Router(nn.Module):
    """A router in the form that most models use."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(NUM_EXPERTS, HIDDEN)

    def forward(self, x):
        logits = functional.linear(x.type(torch.float32), self.weight.type(torch.float32))
        shares, chosen = logits.softmax(-1).topk(TOP_K, dim=-1)
        return chosen, shares


class Mixture(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.gate = router
        self.shared = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.experts = experts_of()
        self.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.experts(x, *self.gate(x)) + self.shared(x)


def test_a_mixture_is_packed_as_a_whole(team):
    mixture = Mixture(Router())
    x = tokens(60)[0]
    expected = mixture(x)
    num_bytes = pack_linears(mixture, team, WeightFormat.FP32)
    torch.testing.assert_close(mixture(x), expected, rtol=1e-5, atol=1e-5)
    parts = mixture.experts.num_bytes + mixture.shared.num_bytes + mixture.gate.weight.nbytes
    assert num_bytes == parts


def test_a_router_is_not_quantised(team):
    mixture = Mixture(Router())
    gate = mixture.gate
    x = tokens(60)[0]
    chosen, shares = gate(x)
    pack_linears(mixture, team, WeightFormat.INT8)
    found, found_shares = gate(x)
    assert torch.equal(found, chosen)
    torch.testing.assert_close(found_shares, shares, rtol=1e-5, atol=1e-6)
    assert mixture.shared.matrix.form is WeightFormat.INT8


def test_a_router_as_a_linear_layer_is_not_quantised(team):
    class LinearRouter(Router):
        def __init__(self):
            super().__init__()
            del self.weight
            self.proj = nn.Linear(HIDDEN, NUM_EXPERTS)

    mixture = Mixture(LinearRouter())
    assert list(router_layers(mixture)) == [mixture.gate.proj]
    pack_linears(mixture, team, WeightFormat.INT8)
    assert mixture.gate.proj.matrix.form is WeightFormat.FP32
    assert mixture.shared.matrix.form is WeightFormat.INT8


def test_tables_and_vectors_stay_as_they_are(team):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.norm = nn.LayerNorm(4)

    model = Model()
    assert pack_linears(model, team, WeightFormat.INT8) == 0
    assert {type(x) for x in model.parameters()} == {nn.Parameter}


def test_each_weight_is_freed_before_the_next_is_packed(team, monkeypatch):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), Mixture(Router()))
    model.requires_grad_(requires_grad=False)
    weights = [weakref.ref(x) for name, x in model.named_parameters() if "gate." not in name]
    weights = [x for x in weights if x().ndim > 1]
    alive = []
    packed = linear._packed

    def counting(*arguments):
        alive.append(sum(x() is not None for x in weights))
        return packed(*arguments)

    monkeypatch.setattr(linear, "_packed", counting)
    pack_linears(model, team, WeightFormat.INT8)
    # The mixture's experts have two matrices, which are packed in one step.
    assert alive == [7, 5, 4, 3, 2, 1]
    assert all(isinstance(x, PackedLinear) for x in model[:4])
