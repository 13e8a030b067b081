"""GGUF's keys and tensors are mapped to transformers' names, or refused by name."""

import math
import struct

import pytest

from engine.errors import CheckpointError
from engine.gguf.architecture import config_of, parameters_of, weights_of
from engine.gguf.container import read_gguf
from tests.kits.models.gguf import tiny

BIAS = {"attn_q.bias": 32, "attn_k.bias": 16, "attn_v.bias": 16}
NORMS = {"attn_q_norm.weight": 8, "attn_k_norm.weight": 8}


def header_of(contents, tmp_path):
    return read_gguf(contents.write(tmp_path / "a.gguf"))


def refusal(contents, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        config_of(header_of(contents, tmp_path))
    return str(caught.value).removeprefix(f"{tmp_path / 'a.gguf'}: ")


def with_parts(contents, parts):
    for i in range(2):
        for name, length in parts.items():
            contents.tensors[f"blk.{i}.{name}"] = ("F32", (length,), bytes(4 * length))
    return contents


def test_the_metadata_makes_a_config(tmp_path):
    assert config_of(header_of(tiny(), tmp_path)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,  # the file stores the fp32 value 9.999999747378752e-06
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "vocab_size": 261,
    }


def test_without_a_head_the_embedding_is_the_head(tmp_path):
    contents = tiny()
    del contents.tensors["output.weight"]
    header = header_of(contents, tmp_path)
    assert config_of(header)["tie_word_embeddings"] is True
    assert "lm_head.weight" not in weights_of(header)


def test_weights_have_transformers_names(tmp_path):
    weights = weights_of(header_of(tiny(), tmp_path))
    assert len(weights) == 3 + 2 * 9
    assert weights["model.layers.1.mlp.down_proj.weight"].tensor.shape == (32, 48)
    turned = {name: w.rotated_heads for name, w in weights.items() if w.rotated_heads is not None}
    assert turned == {
        f"model.layers.{i}.self_attn.{part}_proj.weight": heads
        for i in range(2)
        for part, heads in (("q", 4), ("k", 2))
    }


@pytest.mark.parametrize(
    ("name", "parts", "class_name"),
    [("qwen2", BIAS, "Qwen2ForCausalLM"), ("qwen3", NORMS, "Qwen3ForCausalLM")],
)
def test_other_families_keep_the_order_of_rows(name, parts, class_name, tmp_path):
    header = header_of(with_parts(tiny(name), parts), tmp_path)
    assert config_of(header)["architectures"] == [class_name]
    weights = weights_of(header)
    assert len(weights) == 3 + 2 * (9 + len(parts))
    assert not [weight for weight in weights.values() if weight.rotated_heads is not None]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (
            "general.architecture",
            "gemma3",
            "its architecture is 'gemma3'; read are llama, qwen2, q",
        ),
        ("general.type", "adapter", "general.type is 'adapter', not a model"),
        ("llama.expert_count", 8, "llama.expert_count: mixtures of experts are not read"),
        ("llama.attention.sliding_window", 512, "llama.attention.sliding_window is not supported"),
        ("llama.logit_scale", 0.5, "llama.logit_scale is not supported"),
        ("llama.block_count", 3, "llama.block_count is more than it has tensors for"),
        ("llama.block_count", 1, "llama has no place for the tensor blk.1.attn_k.weight"),
        ("llama.block_count", 2**31, f"llama.block_count is {2**31}"),
        ("llama.feed_forward_length", [48, 64], "llama.feed_forward_length is a list of 2 values"),
        ("llama.feed_forward_length", 64, "blk.0.ffn_gate.weight has shape [48, 32], its metadata"),
        ("llama.embedding_length", 64, "token_embd.weight has shape [261, 32], its metadata says"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0"),
        ("llama.attention.head_count", True, "llama.attention.head_count is True"),
        ("llama.attention.head_count_kv", 4, "blk.0.attn_k.weight has shape [16, 32], its metada"),
        ("llama.attention.value_length", 16, "llama.attention.value_length is not the heads' size"),
        ("llama.rope.dimension_count", 4, "llama.rope.dimension_count is not the heads' size, 8"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "llama.attention.layer_norm_rms_eps"),
        ("llama.rope.scaling.type", "longrope", "llama.rope.scaling.type is 'longrope'"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.factor is None"),
        ("llama.vocab_size", 7, "llama.vocab_size is not the number of rows"),
    ],
)
def test_unknown_metadata_is_refused_by_name(key, value, why, tmp_path):
    contents = tiny()
    contents.values[key] = value
    assert refusal(contents, tmp_path).startswith(why)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_a_missing_tensor_is_named(name, tmp_path):
    contents = tiny()
    contents.tensors["spare.weight"] = contents.tensors.pop(name)
    assert refusal(contents, tmp_path) == f"has no tensor {name}"


def test_a_tensor_without_a_place_is_named(tmp_path):
    contents = with_parts(tiny(), BIAS)
    assert refusal(contents, tmp_path) == "llama has no place for the tensor blk.0.attn_k.bias"


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 2.5, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_scaled_positions_are_kept(scaling, parameters, tmp_path):
    contents = tiny()
    contents.values |= {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    found = config_of(header_of(contents, tmp_path))["rope_parameters"]
    assert found == parameters | {"rope_theta": 10000.0}


def stretched(factor, dim, theta):
    """Returns the frequency factors of Llama 3.1 by Meta's formula, from wave lengths."""
    for i in range(0, dim, 2):
        wave = 2 * math.pi * theta ** (i / dim)
        smooth = (8192 / wave - 1) / 3
        yield 1 if wave < 2048 else factor if wave > 8192 else 1 / ((1 - smooth) / factor + smooth)


@pytest.mark.parametrize(("factor", "dim"), [(8.0, 128), (32.0, 64)])
def test_stretched_frequencies_of_llama_3_are_recognised(factor, dim):
    factors = list(stretched(factor, dim, 500_000.0))
    assert parameters_of(factors, 500_000.0) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parameters_of([*factors[:-1], factor * 1.01], 500_000.0) is None
    assert parameters_of([math.nan] * 8, 500_000.0) is None
    assert parameters_of([1.0] * 8, 500_000.0) == {"rope_type": "default"}


def test_unknown_frequencies_are_refused(tmp_path):
    contents = tiny()
    contents.tensors["rope_freqs.weight"] = ("F32", (4,), struct.pack("<4f", 1, 2, 3, 4))
    assert refusal(contents, tmp_path).startswith("rope_freqs.weight fits no known")
    contents.tensors["rope_freqs.weight"] = ("F32", (4,), struct.pack("<4f", 1, 1, 1, 1))
    assert config_of(header_of(contents, tmp_path))["rope_parameters"]["rope_type"] == "default"
