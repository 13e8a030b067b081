"""Configuration errors suggest similar keys and values."""

import pytest

from engine.config import load_config
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("gateway.prot", 1, "did you mean gateway.port?"),
        ("gatewy.port", 1, "did you mean gateway?"),
        ("worker.max_model_length", 1, "did you mean worker.max_model_len"),
        ("gateway.kv_mib", 1, "did you mean worker.kv_mib?"),
        ("router.policy", "least-load", "did you mean least-loaded?"),
        ("worker.decode_kv_dtype", "bf6", "did you mean bf16"),
        ("worker.kv_transport", "zqm", "did you mean zmq?"),
    ],
)
def test_similar_names_are_suggested(key, value, hint):
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {key: value})
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("worker.quux", 1), ("worker.kv_mib", "x"), ("router.policy", "xyz")]
)
def test_without_a_similar_name_nothing_is_suggested(key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {key: value})
    assert "did you mean" not in str(caught.value)
