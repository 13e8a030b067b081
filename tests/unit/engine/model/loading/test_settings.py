"""A wrong value in config.json is reported in one sentence, before a model is created."""

from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.model.loading.settings import check_settings

FOLDER = Path("/m")
RIGHT = {"model_type": "llama", "max_position_embeddings": 512, "eos_token_id": 2}


def said(config):
    with pytest.raises(CheckpointError) as caught:
        check_settings(FOLDER, config)
    where, _, message = str(caught.value).partition(": ")
    assert where == str(FOLDER / "config.json")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_id": None},
        {"eos_token_id": [1, 2]},
        {"dtype": "bfloat16"},
        {"torch_dtype": "torch.float16"},
        {"dtype": None},
        {"hidden_act": "silu"},
        {"hidden_act": None},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": {}}},
        {"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": None},
    ],
)
def test_right_values_pass(changes):
    check_settings(FOLDER, RIGHT | changes)


def test_a_config_may_name_no_length():
    check_settings(FOLDER, {"model_type": "bloom"})


LENGTH = "not a number of tokens"
EOS = "not a token's number or a list of them"
DTYPE = "it names a type such as float32, float16, bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": None}, f"max_position_embeddings is null, {LENGTH}"),
        ({"max_position_embeddings": "512"}, f"max_position_embeddings is '512', {LENGTH}"),
        ({"max_position_embeddings": 0}, f"max_position_embeddings is 0, {LENGTH}"),
        ({"max_position_embeddings": True}, f"max_position_embeddings is True, {LENGTH}"),
        ({"max_position_embeddings": 1e3}, f"max_position_embeddings is 1000.0, {LENGTH}"),
        ({"eos_token_id": "</s>"}, f"eos_token_id is '</s>', {EOS}"),
        ({"eos_token_id": [2, None]}, f"eos_token_id is [2, None], {EOS}"),
        ({"eos_token_id": {"a": 1}}, f"eos_token_id is {{'a': 1}}, {EOS}"),
        ({"dtype": "auto"}, f"dtype is 'auto'; {DTYPE}"),
        ({"torch_dtype": "half"}, f"torch_dtype is 'half'; {DTYPE}"),
        ({"dtype": 16}, f"dtype is 16; {DTYPE}"),
        ({"text_config": {"dtype": "auto"}}, f"dtype is 'auto'; {DTYPE}"),
        ({"hidden_act": "nonsense"}, "hidden_act is 'nonsense', an unknown activation"),
        ({"hidden_activation": "geglu"}, "hidden_activation is 'geglu', an unknown activation"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    assert said(RIGHT | changes) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "nonsense", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "nonsense"}},
        {"rope_parameters": {"rope_type": "nonsense"}},
        {"rope_parameters": {"full_attention": {"rope_type": "nonsense"}}},
        {"text_config": {"rope_parameters": {"rope_type": "nonsense"}}},
    ],
)
def test_an_unknown_type_of_rotary_embeddings_is_named(changes):
    assert "has the type 'nonsense', which is none of: axial, default" in said(RIGHT | changes)


@pytest.mark.parametrize("config", [[], "x", 3, None])
def test_a_config_is_an_object(config):
    assert said(config) == "not a JSON object"
