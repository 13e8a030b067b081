"""Models that Baton once served wrongly, or that failed at their first step: now right, or
refused.
"""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import WeightFormat
from engine.errors import CheckpointError
from engine.model.loading.purpose import PAGE
from engine.model.native import linear
from tests.kits.checkpoints import COMMON, KINDS, OWN_CODE, save_checkpoint, tiny_checkpoint
from tests.kits.models.served import (
    WEIGHTS,
    Served,
    check_equals_generate,
    edit_config,
    generate,
    prompt,
    store_as,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": COMMON
    | {"head_dim": 8, "sliding_window": 12, "layer_types": KINDS["gemma3"]["layer_types"]},
    "vision_config": VISION,
    "mm_tokens_per_image": 4,
}


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        Served(path).runner.close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save_ministral3(path, original, *, context_len=512):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    extra = {"model_type": "ministral3", "head_dim": 8, "rope_parameters": rope}
    save_checkpoint(path, COMMON | extra | {"max_position_embeddings": context_len})


def test_ministral_3_equals_generate_beyond_its_original_context(tmp_path, caplog):
    """Beyond that length, the model scales its queries by the logarithm of their position."""
    save_ministral3(tmp_path, 64)
    assert not check_equals_generate(tmp_path, lengths=(5, 200), num_blocks=20)
    assert "fused logits are off" in caplog.text


@pytest.mark.long
def test_ministral_3_equals_generate_at_its_real_lengths(tmp_path):
    save_ministral3(tmp_path, 16_384, context_len=262_144)
    with Served(tmp_path, num_blocks=1040) as model:
        for length in (5, 16_500):
            found = model.answer(prompt(length), 8, chunk=512)
            assert found == generate(tmp_path, prompt(length), 8)


LONGCAT = {
    "model_type": "longcat_flash",
    "num_layers": 2,
    "num_hidden_layers": 4,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
HUNYUAN = {"model_type": "hunyuan_v1_moe", "head_dim": 8, "num_experts": 4, "moe_topk": 2}
HUNYUAN_LISTS = HUNYUAN | {"moe_topk": [2, 2, 1]}  # one number for each layer


@pytest.mark.parametrize(
    "extra", [HUNYUAN, HUNYUAN_LISTS, LONGCAT], ids=["hunyuan", "hunyuan-lists", "longcat"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_whose_weights_are_read_by_another_module_works(extra, dtype, tmp_path):
    save_checkpoint(tmp_path, COMMON | extra)
    store_as(tmp_path, dtype)
    check_equals_generate(tmp_path)


def test_dbrx_in_bf16_equals_generate(tmp_path):
    """The experts use the weights of a child module, whose bf16 does not fit fp32 activations."""
    config = {
        "model_type": "dbrx",
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "vocab_size": 260,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "initializer_range": 0.3,
        "eos_token_id": 257,
    }
    save_checkpoint(tmp_path, config)
    store_as(tmp_path, torch.bfloat16)
    check_equals_generate(tmp_path)


@pytest.fixture
def llama(tmp_path, tmp_path_factory):
    """Returns a copy of a Llama checkpoint that a test may change."""
    return shutil.copytree(tiny_checkpoint(tmp_path_factory, "llama"), tmp_path / "llama")


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForSequenceClassification",
        "LlamaModel",
        "Qwen2ForRewardModel",
        "LlamaForTokenClassification",
    ],
)
def test_a_model_that_does_not_answer_with_text_is_refused(llama, architecture):
    edit_config(llama, architectures=[architecture], tie_word_embeddings=True)
    assert refusal(llama) == (
        f"config.json: architectures has {architecture}, which is not a decoder of text; {PAGE}"
    )


def test_an_unused_head_is_refused(llama):
    """The head belongs to a classifier, but the config does not mention it."""
    edit_config(llama, architectures=None, tie_word_embeddings=True)
    weights = load_file(llama / WEIGHTS)
    del weights["lm_head.weight"]
    weights["score.weight"] = torch.zeros(2, 32)
    save_file(weights, llama / WEIGHTS, metadata={"format": "pt"})
    assert refusal(llama) == f"{llama}: the model has no place for the weights score.weight"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adapter_config.json", "an adapter beside its base; merge them into one checkpoint"),
        ("config_sentence_transformers.json", "a model of embeddings, and modules.json is missing"),
    ],
)
def test_a_directory_of_another_purpose_is_refused(llama, name, reason):
    (llama / name).write_text("{}")
    assert refusal(llama) == f"{llama / name}: {reason}"


def test_layers_beyond_those_of_the_config_are_refused(llama):
    edit_config(llama, num_hidden_layers=2)
    message = refusal(llama)
    assert message.startswith(f"{llama}: weights have model.layers.2.input_layernorm.weight, ")
    assert message.endswith(" and 6 more, though num_hidden_layers is 2")


def test_layers_for_later_tokens_are_logged_and_unused(llama, caplog):
    caplog.set_level(logging.INFO)
    edit_config(llama, num_hidden_layers=2, num_nextn_predict_layers=1)
    Served(llama).runner.close()
    assert "weights not used: model.layers.2.input_layernorm.weight" in caplog.text


def test_weights_without_effect_on_tokens_are_logged_and_unused(llama, caplog):
    caplog.set_level(logging.INFO)
    weights = load_file(llama / WEIGHTS)
    weights["mtp.fc.weight"] = torch.zeros(4)
    save_file(weights, llama / WEIGHTS, metadata={"format": "pt"})
    Served(llama).runner.close()
    assert "weights not used: mtp.fc.weight" in caplog.text


def test_gemma_3_with_vision_is_computed_as_a_whole(tmp_path):
    save_checkpoint(tmp_path, GEMMA3)
    assert check_equals_generate(tmp_path)


PALIGEMMA = {
    "model_type": "paligemma",
    "text_config": COMMON | {"model_type": "gemma", "head_dim": 8},
    "vision_config": VISION | {"model_type": "siglip_vision_model", "projection_dim": 32},
    "image_token_index": 259,
    "projection_dim": 32,
    "hidden_size": 32,
}
SHARING = COMMON | {
    "head_dim": 8,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 260,
}
GEMMA4 = SHARING | {"model_type": "gemma4_text", "global_head_dim": 8}
GEMMA3N = SHARING | {
    "model_type": "gemma3n_text",
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
    "intermediate_size": [48] * 6,
}
BOTH_WAYS = {
    "paligemma": PALIGEMMA,
    "gemma": COMMON | KINDS["gemma"] | {"use_bidirectional_attention": True},
    "gemma2": COMMON | KINDS["gemma2"] | {"use_bidirectional_attention": True},
    "gemma3": COMMON | KINDS["gemma3"] | {"use_bidirectional_attention": True},
    "gemma4": GEMMA4 | {"use_bidirectional_attention": "all"},
}


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_a_model_that_attends_to_its_whole_prompt_is_refused(kind, tmp_path):
    save_checkpoint(tmp_path, BOTH_WAYS[kind])
    assert refusal(tmp_path) == (
        "config.json: bidirectional attention cannot be served (use_bidirectional_attention is "
        f"set); {PAGE}"
    )


CAUSAL = {
    "paligemma": PALIGEMMA
    | {"text_config": PALIGEMMA["text_config"] | {"use_bidirectional_attention": False}},
    "gemma": COMMON | KINDS["gemma"] | {"use_bidirectional_attention": False},
    "gemma4": GEMMA4 | {"use_bidirectional_attention": "vision"},
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_relative_that_attends_causally_to_text_is_served(kind, tmp_path):
    save_checkpoint(tmp_path, CAUSAL[kind])
    check_equals_generate(tmp_path)


@pytest.mark.parametrize("sharing", [GEMMA3N, GEMMA4], ids=["gemma3n", "gemma4"])
@pytest.mark.parametrize("num_shared", [pytest.param(0, marks=pytest.mark.long), 2, 3])
def test_layers_that_share_kv_are_served_and_store_it_once(sharing, num_shared, tmp_path):
    save_checkpoint(tmp_path, sharing | {"num_kv_shared_layers": num_shared})
    check_equals_generate(tmp_path, lengths=(5, 100), num_blocks=10)
    with Served(tmp_path) as model:
        assert model.runner.layout.sections[0].num_layers == 6 - num_shared


NEMOTRON = COMMON | {
    "model_type": "nemotron_h",
    "head_dim": 8,
    "num_hidden_layers": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}


@pytest.mark.parametrize("other", ["mlp", "moe"])
def test_layers_without_attention_need_no_kv(other, tmp_path):
    layers = [other, "full_attention", "mlp", "full_attention"]
    save_checkpoint(tmp_path, NEMOTRON | {"layers_block_type": layers})
    check_equals_generate(tmp_path)
    with Served(tmp_path) as model:
        assert model.runner.layout.sections[0].num_layers == 2


def test_layers_with_a_state_are_refused_beside_attention(tmp_path):
    layers = ["mlp", "full_attention", "linear_attention", "full_attention"]
    save_checkpoint(tmp_path, NEMOTRON | {"layers_block_type": layers})
    assert refusal(tmp_path).startswith("config.json: layers with a recurrent state cannot be")


@pytest.mark.parametrize("kind", ["jetmoe", "dbrx", "qwen2_moe"])
@pytest.mark.parametrize("is_said", [False, True])
def test_experts_that_stay_in_fp32_give_a_warning(kind, is_said, tmp_path, caplog, monkeypatch):
    if is_said:  # the experts then look like an unknown kind
        monkeypatch.setattr(linear, "kind_of_experts", lambda _module: None)
    save_checkpoint(tmp_path, OWN_CODE[kind])
    Served(tmp_path, weights=WeightFormat.INT8).runner.close()
    said = [r for r in caplog.records if "of its weights stay in fp32" in r.message]
    assert [r.levelname for r in said] == ["WARNING"] * is_said


def test_layers_of_two_head_sizes_are_refused(tmp_path):
    save_checkpoint(tmp_path, GEMMA4 | {"global_head_dim": 16})
    assert "layers with KV of different sizes cannot be served" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2_moe", "phimoe", "hunyuan"])
def test_rounding_may_change_which_experts_are_chosen(kind, tmp_path):
    """Logits then differ by far more than rounding errors, although the model is right."""
    phimoe = {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2}
    kinds = {"qwen2_moe": OWN_CODE["qwen2_moe"], "phimoe": phimoe, "hunyuan": HUNYUAN}
    save_checkpoint(tmp_path, COMMON | kinds[kind])
    with Served(tmp_path, weights=WeightFormat.BF16) as model:
        whole = model.answer(prompt(20), 8)
        assert model.answer(prompt(20), 8, chunk=3) == whole


SEEING = {
    "qwen2_5_vl": {
        "text_config": COMMON
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            }
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
    },
    "llava": {
        "text_config": COMMON | {"model_type": "llama", "head_dim": 8},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 8},
        "image_token_index": 259,
    },
    "mistral3": {
        "text_config": COMMON | {"model_type": "mistral", "head_dim": 8},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 259,
    },
}


@pytest.mark.parametrize("model_type", SEEING)
def test_models_with_vision_serve_text(model_type, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_checkpoint(tmp_path, SEEING[model_type] | {"model_type": model_type})
    assert check_equals_generate(tmp_path)
    assert "is not used for text" in caplog.text


def save_with_rope(path, **rope):
    extra = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": 128}
    save_checkpoint(path, COMMON | extra | {"rope_parameters": {"rope_theta": 1e4} | rope})


def test_dynamic_rotary_embeddings_are_right_over_the_whole_context(tmp_path):
    save_with_rope(tmp_path, rope_type="dynamic", factor=4.0, original_max_position_embeddings=64)
    check_equals_generate(tmp_path, lengths=(5, 60, 119))
    with Served(tmp_path) as model:
        assert model.runner.context_len == 128


def test_a_shortened_context_is_logged(tmp_path, caplog):
    save_with_rope(
        tmp_path,
        rope_type="longrope",
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        original_max_position_embeddings=64,
    )
    check_equals_generate(tmp_path, lengths=(5, 55))
    with Served(tmp_path) as model:
        assert model.runner.context_len == 64
    assert "its context is limited to 64 of 128 tokens: rotary embeddings" in caplog.text
