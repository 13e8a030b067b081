"""The length of a context follows from rotary embeddings, in every form in which configs write
them.
"""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import CheckpointError, ConfigError
from engine.model.loading.positions import context_length, stretch
from engine.model.runner import TorchRunner
from tests.kits.checkpoints import COMMON, save_checkpoint
from tests.kits.models.served import Served, check_equals_generate, generate, prompt

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}


def config_of(model_type="llama", named=512, **properties):
    return AutoConfig.for_model(
        model_type, **COMMON | {"max_position_embeddings": named, "head_dim": 8} | properties
    )


def served(config, max_len=None):
    return context_length(config.get_text_config(decoder=True), max_len).served


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
ROPES = [  # parameters, max_position_embeddings, context without and with max_model_len
    ({"rope_type": "default"}, 512, 512, 512),
    (LINEAR, 512, 2048, 2048),
    ({"rope_type": "linear", "factor": 2}, 512, 1024, 1024),
    ({"rope_type": "linear", "factor": 2.5}, 511, 1277, 1277),
    ({"rope_type": "yarn", "factor": 4.0}, 512, 2048, 2048),
    (YARN, 512, 2048, 2048),
    (YARN, 640, 2048, 2048),
    (YARN, 2048, 2048, 2048),
    (YARN | {"factor": None}, 2048, 2048, 2048),
    (
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        2048,
        2048,
        2048,
    ),
    (DYNAMIC, 512, 512, 2048),
    ({"rope_type": "dynamic", "factor": 1.0}, 512, 512, 512),
    ({"rope_type": "longrope", "original_max_position_embeddings": 512} | LONG, 4096, 512, 4096),
    (
        {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512} | LONG,
        512,
        512,
        4096,
    ),
    ({"rope_type": "longrope"} | LONG, 512, 512, 512),
]


@pytest.mark.parametrize(("rope", "named", "alone", "longest"), ROPES)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "type"])
def test_rotary_embeddings_determine_the_context_length(rope, named, alone, longest, style):
    rope = dict(rope)
    if style == "type":
        rope["type"] = rope.pop("rope_type")
    key = "rope_parameters" if style == "rope_parameters" else "rope_scaling"
    config = config_of(named=named, **{key: rope})
    assert served(config) == alone
    assert served(config, alone) == alone
    assert served(config, alone + 1) == longest


@pytest.mark.parametrize(
    ("model_type", "full", "sliding", "expected"),
    [
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, {}, 512),  # names the product
        ("olmo3", {"rope_type": "yarn", "factor": 4.0}, {}, 2048),
        ("olmo3", LINEAR, {}, 2048),
        ("olmo3", {}, LINEAR, 512),
        ("olmo3", LINEAR, DYNAMIC, 512),
    ],
)
def test_layers_that_see_all_tokens_decide(model_type, full, sliding, expected):
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4} | full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4} | sliding,
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = config_of(model_type, rope_parameters=ropes, layer_types=kinds)
    assert served(config) == expected


def test_a_model_without_rotary_embeddings_has_the_length_that_it_names():
    assert served(AutoConfig.for_model("gpt2", n_positions=300)) == 300


@pytest.mark.parametrize("value", [None, 0, -5, "512", True, 512.0])
def test_an_invalid_length_is_refused(value):
    config = config_of()
    object.__setattr__(config, "max_position_embeddings", value)
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        context_length(config, None)


def save(path, named=64, **rope):
    extra = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": named}
    save_checkpoint(path, COMMON | extra | {"rope_parameters": {"rope_theta": 1e4} | rope})


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_a_model_equals_generate_over_its_scaled_context(rope_type, tmp_path):
    save(tmp_path, rope_type=rope_type, factor=4.0)
    assert check_equals_generate(tmp_path, lengths=(5, 100, 200), num_blocks=16)
    with Served(tmp_path, num_blocks=16) as model:
        assert model.runner.context_len == 256


def opened(path, max_len):
    runner = TorchRunner(path, num_blocks=16, max_len=max_len)
    runner.open()
    return runner


def test_longrope_beyond_its_change_is_long_throughout(tmp_path, caplog):
    """For a prompt beyond the change, transformers uses the long factors too."""
    save(tmp_path, 256, rope_type="longrope", original_max_position_embeddings=64, **LONG)
    with Served(tmp_path, num_blocks=16, max_len=200) as model:
        assert model.runner.context_len == 200
        assert model.answer(prompt(100), 8, chunk=48) == generate(tmp_path, prompt(100), 8)
        stretched = model.runner.fingerprint
    assert "are computed for 256 tokens from the first one on" in caplog.text
    with Served(tmp_path, max_len=60) as model:
        assert model.answer(prompt(40), 8) == generate(tmp_path, prompt(40), 8)
        assert model.runner.fingerprint != stretched


def test_dynamic_embeddings_beyond_their_change_equal_the_longest_context():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    grown = LlamaRotaryEmbedding(config_of(rope_parameters=dict(rope)))
    grown(torch.zeros(1), torch.tensor([[2047]]))
    config = config_of(rope_parameters=dict(rope))
    stretch(config)
    torch.testing.assert_close(LlamaRotaryEmbedding(config).inv_freq, grown.inv_freq)


def test_more_than_the_longest_context_is_refused(tmp_path):
    save(tmp_path, rope_type="dynamic", factor=4.0)
    opened(tmp_path, 256).close()
    with pytest.raises(ConfigError, match="max_model_len is 257, but the model's context is 256"):
        opened(tmp_path, 257)
