"""Loading detects model properties that a worker's pass does not compute, for many changed models.

Each test changes the modules of a loaded model. Then either the model is refused, or the served
logits equal the logits of the changed model's own code, at near and far positions.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from engine.config import WeightFormat
from engine.errors import CheckpointError
from engine.layout import KVFormat
from engine.model.attention import hook
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cpu import CpuForward
from engine.model.loading import checkpoint, probe
from engine.worker.batch import Row
from tests.kits.checkpoints import CONTEXT_LEN, tiny_checkpoint

pytestmark = pytest.mark.torch

TOKEN_IDS = [(7 * i * i + 3) % 256 for i in range(CONTEXT_LEN)]
TOLERANCE = 2e-3  # largest error, relative to the spread of the logits
NUM_COMPARED = 64


def multiplied(module, factor):
    module.register_forward_hook(lambda _module, _args, output: scaled(output, factor))


def scaled(output, factor):
    return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor


def changed_to(module, function):
    module.register_forward_hook(lambda _module, _args, output: function(output))


def by_position(module, function):
    """Makes `module` multiply its hidden states by a function of their positions."""

    def before(_module, args, kwargs):
        factor = function(kwargs["position_ids"].float())[..., None]
        if args:
            return (args[0] * factor, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] * factor}

    module.register_forward_pre_hook(before, with_kwargs=True)


def set_eps(norm, eps):
    norm.variance_epsilon = eps


def add_bias(linear):
    linear.bias = nn.Parameter(torch.linspace(-0.5, 0.5, linear.out_features), requires_grad=False)


def shift(module):
    """Adds a part of the previous token's hidden state, which is a state besides K and V."""

    def before(_module, args):
        return (0.7 * args[0] + 0.3 * args[0].roll(1, dims=1),)

    module.register_forward_pre_hook(before)


def stretch_with_the_batch(model):
    """Makes rotary embeddings depend on the longest sequence of a batch."""
    rotary = model.model.rotary_emb

    def before(_module, args, kwargs):
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        stretched = positions.float() / (1 + positions.max() / 100)
        return (args[0],), {"position_ids": stretched}

    rotary.register_forward_pre_hook(before, with_kwargs=True)


def layer(model):
    """Returns a layer that is not the first. A builder might use the first layer's properties for
    all.
    """
    return model.model.layers[1]


CHANGES = {
    "nothing": lambda model: None,
    "bias of the output": lambda model: add_bias(layer(model).self_attn.o_proj),
    "bias of a query": lambda model: add_bias(layer(model).self_attn.q_proj),
    "epsilon of one norm": lambda model: set_eps(layer(model).input_layernorm, 0.5),
    "epsilon of the last norm": lambda model: set_eps(model.model.norm, 0.5),
    "activation of one layer": lambda model: setattr(layer(model).mlp, "act_fn", nn.ReLU()),
    "activation of all": lambda model: [
        setattr(each.mlp, "act_fn", nn.Tanh()) for each in model.model.layers
    ],
    "scale of scores": lambda model: setattr(layer(model).self_attn, "scaling", 0.9),
    "scale of an embedding": lambda model: multiplied(model.model.embed_tokens, 3.0),
    "shift of an embedding": lambda model: changed_to(model.model.embed_tokens, lambda x: x + 0.3),
    "scale of logits": lambda model: multiplied(model.lm_head, 0.3),
    "cap of logits": lambda model: changed_to(model.lm_head, lambda x: 5 * torch.tanh(x / 5)),
    "scale of a residual": lambda model: multiplied(layer(model).mlp, 0.6),
    "scale of an attention": lambda model: multiplied(layer(model).self_attn, 0.6),
    "scale of a rotation": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.3),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.7),
    "half of the frequencies": lambda model: model.model.rotary_emb.inv_freq[2:].zero_(),
    "clamp of queries": lambda model: changed_to(
        layer(model).self_attn.q_proj, lambda x: x.clamp(-0.3, 0.3)
    ),
    "norm of keys": lambda model: changed_to(
        layer(model).self_attn.k_proj, lambda x: x / x.norm(dim=-1, keepdim=True)
    ),
    "mean taken off by a norm": lambda model: changed_to(
        layer(model).input_layernorm, lambda x: x - x.mean(-1, keepdim=True)
    ),
    "bias of a norm": lambda model: changed_to(layer(model).input_layernorm, lambda x: x + 0.2),
    "gate between layers": lambda model: changed_to(layer(model), lambda x: x * x.sigmoid()),
    "window of one layer": lambda model: setattr(layer(model).self_attn, "sliding_window", 12),
    "causality, which only an explicit mask gives": lambda model: [
        setattr(each.self_attn, "is_causal", False) for each in model.model.layers
    ],
    "state of a token": lambda model: shift(layer(model).mlp),
    "length of the batch": stretch_with_the_batch,
    "logarithm of the position": lambda model: by_position(
        layer(model), lambda at: 1 + 0.1 * torch.log1p(torch.floor(at / 128))
    ),
    "position, a little everywhere": lambda model: by_position(
        layer(model), lambda at: 1 + at / 5000
    ),
}


REFUSED = {
    "causality, which only an explicit mask gives",
    "state of a token",
    "length of the batch",
    "window of one layer",
    # Hooks of a linear layer, which are lost when the layer is packed.
    "scale of logits",
    "cap of logits",
    "clamp of queries",
    "norm of keys",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory, "llama")


def logits_served(path, change):
    """Returns the logits of the longest context's last tokens; None if the model is refused."""
    load_weights = checkpoint._load_weights

    def changed(*arguments):
        model = load_weights(*arguments)
        with torch.inference_mode():
            change(model)
        return model

    checkpoint._load_weights = changed
    try:
        loaded = checkpoint.load(path, kv_format=KVFormat.FP32, block_size=16, dtype=torch.float32)
        served = CpuForward(loaded, WeightFormat.FP32, threads=1)
        served.open(KVCache(loaded.layout, allocate_buffer(loaded.layout, CONTEXT_LEN // 16)))
    except CheckpointError:
        return None
    finally:
        checkpoint._load_weights = load_weights
    keep = range(CONTEXT_LEN - NUM_COMPARED, CONTEXT_LEN)
    with torch.inference_mode():
        found = served.logits([Row("a", TOKEN_IDS, 0, range(CONTEXT_LEN // 16), None)], keep)
    served.close()
    return found


@torch.inference_mode()
def logits_of(path, change):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    change(model)
    return model(torch.tensor([TOKEN_IDS])).logits[0, -NUM_COMPARED:]


def check_right_or_refused(path, change):
    found, expected = logits_served(path, change), logits_of(path, change)
    if found is not None:
        assert (found - expected).abs().max() <= TOLERANCE * expected.std()
    return found is not None


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_served_as_it_is_or_refused(llama, change):
    is_served = check_right_or_refused(llama, CHANGES[change])
    assert is_served == (change not in REFUSED)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    begins=st.integers(0, CONTEXT_LEN - 1),
    strength=st.sampled_from([-0.5, -0.05, 0.05, 0.5]),
    nth=st.integers(0, 2),
)
def test_a_change_that_begins_at_any_position_is_noticed(llama, begins, strength, nth):
    def step(at):
        return 1 + strength * (at >= begins)

    def change(model):
        by_position(model.model.layers[nth].self_attn, step)

    check_right_or_refused(llama, change)


class Config:
    """The attributes of a config that `probe.origins` uses."""

    def __init__(self, **properties):
        self._properties = properties

    def to_dict(self):
        return self._properties


@pytest.mark.parametrize(
    ("hides", "is_ours"),
    [
        (lambda q, k: k <= q, True),
        (lambda q, k: (k <= q) & (k > q - 77), False),  # although the layer names no window
        (lambda q, k: (k <= q) & (k // 300 == q // 300), False),  # attention in chunks
        (lambda q, k: (k <= q) | (k < 3), False),  # a prefix that attends to later tokens
        (lambda q, k: (k <= q) & ((q - k < 500) | (k == 0)), False),  # but for the first
    ],
)
def test_a_mask_that_hides_more_or_less_is_noticed(hides, is_ours):
    mask = hook.recording_mask(
        device=torch.device("cpu"),
        mask_function=lambda _batch, _head, q, k: hides(q, k),
        config=SimpleNamespace(max_position_embeddings=1000),
    )
    assert (mask.shape == hook.MASK_SHAPE) == is_ours


def test_rows_span_every_length_that_is_named():
    config = Config(
        rope_parameters={"full_attention": {"original_max_position_embeddings": 1000}},
        sliding_window=77,
        hidden_size=500,
        attention_chunk_sizes=[90, 400.0, True],
    )
    origins = probe.origins(config, 5000)
    assert origins[0] == 0
    around = [2 + first for first in origins[1:-1]]
    assert around == [64, 77, 90, 256, 400, 1000, 1024, 4096]
    assert origins[-1] + len(probe.TOKENS) == 5000


def test_few_lengths_are_tried_however_many_are_named():
    assert len(probe.origins(Config(windows=list(range(1000))), 131_072)) < 40
