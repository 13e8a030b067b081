import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from bench.common import shapes
from bench.common.shapes import (
    SHAPES,
    Gains,
    cached_checkpoint,
    cached_pair,
    config_of,
    make_checkpoint,
    tensors_of,
    tokenizer_of,
)
from engine.errors import ConfigError
from engine.model.loading.files import check_files, read_header

TINY = replace(SHAPES["tiny"], vocab_size=300, hidden_size=32, ffn_size=48, num_layers=1)


def tensors_in(path):
    """Returns every tensor of a checkpoint in fp32, read by the definition of the file format."""
    data = (path / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, tensor in read_header(path / "model.safetensors").items():
        begin, end = tensor["data_offsets"]
        bits = np.frombuffer(data[start + begin : start + end], "<u2").astype("<u4") << 16
        found[name] = bits.view("<f4").reshape(tensor["shape"])
    return found


def test_the_default_shape_has_88_million_weights():
    sizes = dict(tensors_of(SHAPES["88m"]))
    assert sum(math.prod(size) for size in sizes.values()) == 88_099_584
    assert len(sizes) == 3 + 12 * 9


def test_a_checkpoint_is_one_that_workers_accept(tmp_path):
    make_checkpoint(tmp_path / "model", TINY, seed=0)
    check_files(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config == json.loads(json.dumps(config_of(TINY)))
    found = {name: values.shape for name, values in tensors_in(tmp_path / "model").items()}
    assert found == dict(tensors_of(TINY))


def test_matrices_keep_the_variance_of_what_they_multiply(tmp_path):
    make_checkpoint(tmp_path / "model", SHAPES["tiny"], seed=0)
    for name, values in tensors_in(tmp_path / "model").items():
        if values.ndim == 1:
            assert (values == 1).all()
        else:
            gain = 1 if name == shapes.EMBEDDING else values.shape[1]
            assert values.var() * gain == pytest.approx(1, rel=0.1)


def test_weights_are_a_function_of_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_checkpoint(tmp_path / name, TINY, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_checkpoint_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "small", TINY)
    first = cached_checkpoint("small", 0, cache=tmp_path)
    monkeypatch.setattr(shapes, "make_checkpoint", None)
    assert cached_checkpoint("small", 0, cache=tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_unfinished_checkpoint_leaves_no_files(tmp_path):
    with pytest.raises(ConfigError, match="vocabulary of 100"):
        make_checkpoint(tmp_path / "model", replace(TINY, vocab_size=100), seed=0)
    assert list(tmp_path.iterdir()) == []


def test_every_id_of_the_tokenizer_has_a_text():
    tokenizer = tokenizer_of(SHAPES["tiny"].vocab_size)
    assert tokenizer.get_vocab_size() == SHAPES["tiny"].vocab_size
    assert all(tokenizer.id_to_token(i) for i in range(SHAPES["tiny"].vocab_size))


# Pairs of a target and a draft model.

PAIR = replace(TINY, num_layers=3)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "small", PAIR)
    return cached_pair("small", 0, cache=tmp_path)


def test_a_draft_is_the_first_layer_of_its_target(pair):
    target, draft = tensors_in(pair.target), tensors_in(pair.draft)
    assert {name: values.shape for name, values in draft.items()} == dict(
        tensors_of(replace(PAIR, num_layers=shapes.DRAFT_LAYERS))
    )
    for name, values in draft.items():
        assert (values == target[name]).all()
    config = json.loads((pair.draft / "config.json").read_text())
    assert config["num_hidden_layers"] == shapes.DRAFT_LAYERS


def test_a_target_differs_from_the_plain_checkpoint_by_its_gains(pair, tmp_path):
    make_checkpoint(tmp_path / "plain", PAIR, seed=0)
    plain, target = tensors_in(tmp_path / "plain"), tensors_in(pair.target)
    gains = Gains()
    expected = {
        "lm_head.weight": 4.0,
        "model.layers.0.self_attn.o_proj.weight": 0.02,
        "model.layers.2.self_attn.o_proj.weight": 0.02,
        "model.layers.0.mlp.down_proj.weight": 1.0,
        "model.layers.1.mlp.down_proj.weight": 0.2 / math.sqrt(2),
        "model.layers.2.mlp.down_proj.weight": 0.2 / math.sqrt(2),
    }
    for name, values in target.items():
        gain = expected.get(name, 1.0 if "o_proj" not in name else 0.02)
        assert gains.of(name, num_layers=3) == pytest.approx(gain)
        # both values are rounded to bf16
        np.testing.assert_allclose(values, gain * plain[name], rtol=2**-6)


def test_a_stranger_has_the_drafts_shape_and_other_weights(pair):
    draft, stranger = tensors_in(pair.draft), tensors_in(pair.stranger)
    assert draft.keys() == stranger.keys()
    for name, values in draft.items():
        assert values.shape == stranger[name].shape
        assert values.ndim == 1 or not (values == stranger[name]).all()
