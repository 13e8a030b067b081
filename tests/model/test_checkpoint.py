"""What can be served is loaded; what cannot is refused in one line that says why."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.layout import KVFormat, KVSection
from engine.model.checkpoint import load
from engine.model.files import INDEX, check_files, fingerprint, read_header
from tests.checkpoints import COMMON, KINDS, save_checkpoint, tiny_checkpoint

pytestmark = pytest.mark.torch

WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(tmp_path, tmp_path_factory):
    """A copy that a test may spoil."""
    return shutil.copytree(tiny_checkpoint(tmp_path_factory, "llama"), tmp_path / "llama")


def load_tiny(path):
    return load(path, kv_format=KVFormat.FP32, block_size=4)


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        load_tiny(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def split_into_shards(path):
    weights = load_file(path / WEIGHTS)
    shards = {f"model-0000{i % 2}-of-00002.safetensors": {} for i in range(2)}
    names = sorted(shards)
    weight_map = {}
    for i, (name, tensor) in enumerate(weights.items()):
        shards[names[i % 2]][name] = tensor
        weight_map[name] = names[i % 2]
    for name, tensors in shards.items():
        save_file(tensors, path / name, metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / WEIGHTS).unlink()
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_the_kv_shape_is_that_of_the_model(kind, tmp_path_factory):
    properties = COMMON | KINDS[kind]
    loaded = load_tiny(tiny_checkpoint(tmp_path_factory, kind))
    assert loaded.layout.sections == (
        KVSection(
            num_layers=3,
            num_kv_heads=properties["num_key_value_heads"],
            head_dim=properties.get("head_dim", 8),
        ),
    )
    assert (loaded.context_len, loaded.vocab_size) == (512, 260)
    assert loaded.eos_token_ids == (257,)
    assert loaded.context.cache is None
    assert not loaded.context.calls


def test_shards_give_the_same_model_as_one_file(llama):
    whole = load_tiny(llama).model.state_dict()
    split_into_shards(llama)
    sharded = load_tiny(llama).model.state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(llama, name):
    (llama / name).unlink()
    assert refusal(llama) == f"{llama / name}: missing"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_not_json_is_named(llama, name):
    (llama / name).write_text("{")
    assert f"{llama / name}: not JSON" in refusal(llama)


def test_a_missing_directory_is_named(tmp_path):
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such directory"


def test_a_directory_without_weights_is_refused(llama):
    (llama / WEIGHTS).unlink()
    assert refusal(llama) == f"{llama}: no *.safetensors file"


def test_a_missing_shard_is_named(llama):
    names = split_into_shards(llama)
    (llama / names[1]).unlink()
    assert refusal(llama) == f"{llama / names[1]}: missing, though {INDEX} names it"


def test_an_index_without_a_map_is_refused(llama):
    (llama / INDEX).write_text("{}")
    assert refusal(llama) == f"{llama / INDEX}: weight_map is missing"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"?" + data[9:],
        lambda data: data + b"\0",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
    ids=["half", "stub", "length", "header", "longer", "lfs pointer"],
)
def test_a_corrupted_weight_file_is_named(llama, spoil):
    file = llama / WEIGHTS
    file.write_bytes(spoil(file.read_bytes()))
    assert refusal(llama).startswith(f"{file}: corrupted")


def test_weights_that_lack_a_tensor_are_refused(llama):
    weights = load_file(llama / WEIGHTS)
    del weights["lm_head.weight"]
    save_file(weights, llama / WEIGHTS, metadata={"format": "pt"})
    assert refusal(llama) == f"{llama}: weights lack lm_head.weight"


def test_weights_of_another_shape_are_refused(llama):
    edit_config(llama, intermediate_size=40)
    assert refusal(llama).startswith(f"{llama}: ")


def test_an_architecture_that_transformers_does_not_know_is_refused(llama):
    edit_config(llama, model_type="nonesuch")
    assert "nonesuch" in refusal(llama)


def test_an_encoder_decoder_is_refused(llama):
    edit_config(llama, model_type="t5")
    assert refusal(llama) == "config.json: model_type 't5' is not a decoder of text"


def test_a_config_without_a_context_length_is_refused(llama):
    edit_config(llama, max_position_embeddings=None)
    assert "max_position_embeddings" in refusal(llama)


REFUSED = {
    "bert": ({}, "over paged KV its logits are not its own"),  # sees the future
    "bloom": ({}, "3 layers made 0 calls"),  # does not use the attention interface
    "gpt_oss": (  # attention sinks
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "over paged KV its logits are not its own",
    ),
    "mamba": ({"state_size": 4}, "layer_types has 'linear_attention'"),
    "deepseek_v3": (  # K and V of different sizes
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
        },
        "K or V differ in (heads, head_dim): [(4, 8), (4, 16)]",
    ),
    "llama4_text": (
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
        "layer_types has 'chunked_attention'",
    ),
    "doge": ({}, "makes a mask of its own"),
    "diffllama": ({}, "3 layers made 6 calls"),
}


@pytest.mark.parametrize("model_type", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_paged_attention_would_compute_wrongly_is_refused(model_type, tmp_path):
    properties, reason = REFUSED[model_type]
    save_checkpoint(tmp_path, COMMON | properties | {"model_type": model_type})
    assert reason in refusal(tmp_path)


def test_context_ends_where_rotary_embeddings_would_change(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    extra = {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_parameters": rope}
    save_checkpoint(tmp_path, COMMON | extra)
    assert load_tiny(tmp_path).context_len == 64


def mark(path, *, dtype="float32", kv_format="fp32"):
    return fingerprint(path, dtype=dtype, kv_format=kv_format)


def test_the_fingerprint_is_that_of_a_copy(llama, tmp_path_factory):
    assert mark(llama) == mark(tiny_checkpoint(tmp_path_factory, "llama"))
    assert len(mark(llama)) == 16
    assert int(mark(llama), 16) >= 0
    edit_config(llama, transformers_version="0.0", _name_or_path="elsewhere")
    assert mark(llama) == mark(tiny_checkpoint(tmp_path_factory, "llama"))


def test_the_fingerprint_depends_on_how_the_model_is_served(llama):
    assert mark(llama) != mark(llama, dtype="bfloat16")
    assert mark(llama) != mark(llama, kv_format="bf16")


def test_the_fingerprint_changes_with_every_part_of_the_checkpoint(llama):
    marks = [mark(llama)]
    edit_config(llama, rms_norm_eps=1e-3)
    marks.append(mark(llama))
    tokenizer = llama / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<turn>", "<tern>"))
    marks.append(mark(llama))
    weights = load_file(llama / WEIGHTS)
    weights["model.norm.weight"] = weights["model.norm.weight"].reshape(2, -1)  # shape alone
    save_file(weights, llama / WEIGHTS)
    marks.append(mark(llama))
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1  # values alone
    save_file(weights, llama / WEIGHTS)
    marks.append(mark(llama))
    assert len(set(marks)) == len(marks)


def test_files_can_be_checked_without_loading_them(llama):
    check_files(llama)
    header = read_header(llama / WEIGHTS)
    assert header["lm_head.weight"]["shape"] == [260, 32]
