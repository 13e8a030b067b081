"""Checkpoints are either loaded, or refused with the reason in one line."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import WeightFormat
from engine.errors import CheckpointError
from engine.layout import KVFormat, KVSection
from engine.model.attention.base import build_batch
from engine.model.attention.hook import forward
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cpu import CpuForward
from engine.model.loading import purpose, settings, stored
from engine.model.loading.checkpoint import load
from engine.model.loading.files import INDEX, check_files, fingerprint, read_header
from engine.worker.batch import Row
from tests.kits.checkpoints import COMMON, KINDS, save_checkpoint, tiny_checkpoint

pytestmark = pytest.mark.torch

WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(tmp_path, tmp_path_factory):
    """Returns a copy of a Llama checkpoint that a test may change."""
    return shutil.copytree(tiny_checkpoint(tmp_path_factory, "llama"), tmp_path / "llama")


def load_tiny(path, kv_format=KVFormat.FP32):
    return load(path, kv_format=kv_format, block_size=4)


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
def test_the_kv_shape_is_the_model_s(kind, tmp_path_factory):
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
    assert refusal(llama) == f"{llama}: no *.safetensors or *.gguf file"


def test_a_missing_shard_is_named(llama):
    names = split_into_shards(llama)
    (llama / names[1]).unlink()
    assert refusal(llama) == f"{llama / names[1]}: missing, though {INDEX} names it"


def test_an_index_without_a_map_is_refused(llama):
    (llama / INDEX).write_text("{}")
    assert refusal(llama) == f"{llama / INDEX}: weight_map is missing"


def change_map(path, **changes):
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= changes
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "./x", "", "..", "x\0", 7, None],
)
def test_an_index_names_files_of_its_folder_only(llama, name):
    split_into_shards(llama)
    change_map(llama, **{"lm_head.weight": name})
    assert refusal(llama) == (f"{llama / INDEX}: names {name!r}, which is no file of this folder")


def test_shards_may_be_links_as_in_the_caches_of_hubs(llama, tmp_path):
    (tmp_path / "blobs").mkdir()
    for name in split_into_shards(llama):
        (llama / name).rename(tmp_path / "blobs" / name)
        (llama / name).symlink_to(tmp_path / "blobs" / name)
    assert load_tiny(llama).context_len == 512


def test_an_index_that_names_the_wrong_shard_is_refused(llama):
    first, second = split_into_shards(llama)
    index = json.loads((llama / INDEX).read_text())["weight_map"]
    right = index["lm_head.weight"]
    wrong = second if right == first else first
    change_map(llama, **{"lm_head.weight": wrong})
    assert refusal(llama) == f"{llama / INDEX}: lm_head.weight is not in {wrong}: it is in {right}"
    change_map(llama, **{"lm_head.weight": right, "another": first})
    assert refusal(llama) == f"{llama / INDEX}: another is not in {first}: no shard has it"


def test_shards_without_their_index_are_refused(llama):
    first, _ = split_into_shards(llama)
    (llama / INDEX).unlink()
    assert refusal(llama) == (
        f"{llama}: has {first}, but neither {WEIGHTS} nor {INDEX}, which names shards"
    )


@pytest.mark.parametrize("slow", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_slow_tokenizer_alone_is_refused_with_the_way_to_convert_it(llama, slow):
    (llama / "tokenizer.json").rename(llama / slow)
    message = refusal(llama)
    assert message.startswith(f"{llama / 'tokenizer.json'}: missing, and {slow} cannot be used")
    assert "AutoTokenizer" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_weight_that_is_no_number_is_named(llama, name, value):
    weights = load_file(llama / WEIGHTS)
    weights[name].view(-1)[-3] = value  # the row of a token that the trial does not use
    save_file(weights, llama / WEIGHTS, metadata={"format": "pt"})
    assert refusal(llama) == f"{llama}: the weight {name} has NaN or infinity"


def test_code_of_a_checkpoint_never_runs_nor_asks(llama, monkeypatch):
    edit_config(llama, model_type="own", auto_map={"AutoConfig": "own.Config"})
    (llama / "own.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert refusal(llama) == (
        f"{llama / 'config.json'}: the model is code of its own (auto_map), which never runs"
    )
    edit_config(llama, model_type="llama")  # a type that transformers supports
    assert load_tiny(llama).context_len == 512


def test_known_names_are_names_of_transformers():
    assert set(ACT2FN) == settings.ACTIVATIONS
    assert set(ROPE_INIT_FUNCTIONS) <= settings.ROPE_TYPES


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
    assert refusal(llama) == (
        f"{llama}: model.layers.0.mlp.down_proj.weight has shape [32, 48], "
        "config.json says [32, 40]"
    )


def test_an_architecture_that_transformers_does_not_know_is_refused(llama):
    edit_config(llama, model_type="nonesuch")
    assert "nonesuch" in refusal(llama)


def test_an_encoder_decoder_is_refused(llama):
    edit_config(llama, model_type="t5")
    assert refusal(llama) == (
        f"config.json: model_type 't5' is not a decoder of text; {purpose.PAGE}"
    )


def test_a_config_without_a_context_length_is_refused(llama):
    edit_config(llama, max_position_embeddings=None)
    assert "max_position_embeddings" in refusal(llama)


REFUSED = {
    "bert": ({}, "builds its own mask"),  # attends to later tokens
    "bloom": ({}, "its code in transformers does not use the attention interface"),  # ALiBi
    "gpt_oss": (  # attention sinks
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "attention sinks cannot be served (over paged KV its logits differ)",
    ),
    "mamba": (
        {"state_size": 4},
        "layers with a recurrent state cannot be served (layer_types has 'linear_attention')",
    ),
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
        "MLA (latent KV) cannot be served (K or V differ in (heads, head_dim): [(4, 8), (4, 16)])",
    ),
    "llama4_text": (
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
        "attention in chunks cannot be served (layer_types has 'chunked_attention')",
    ),
    "doge": ({}, "builds its own mask"),
    "falcon": ({"alibi": True}, "its code in transformers does not use the attention interface"),
    "bart": (  # positions are counted, not taken from `position_ids`
        {"decoder_layers": 3, "decoder_ffn_dim": 48, "pad_token_id": 1},
        "its attention or its positions are not like ours",
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv"]},
        "convolution layers with a state cannot be served (layer_types has 'conv')",
    ),
    "diffllama": ({}, "layer 0 calls attention 2 times"),
}


@pytest.mark.parametrize("model_type", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_paged_attention_would_compute_wrongly_is_refused(model_type, tmp_path):
    properties, reason = REFUSED[model_type]
    save_checkpoint(tmp_path, COMMON | properties | {"model_type": model_type})
    message = refusal(tmp_path)
    assert reason in message
    assert message.endswith(purpose.PAGE)


SERVED = {
    "opt": ({}, 4, 8),  # positions have learned embeddings
    "gpt2": ({}, 4, 8),
    "deepseek_v3": (  # K and V have one size, also possible with latent attention
        REFUSED["deepseek_v3"][0] | {"v_head_dim": 16},
        4,
        16,
    ),
    "gemma3": (  # also accepts images; only its part for text is served
        {
            "text_config": COMMON | {"head_dim": 8, "sliding_window": 12},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        2,
        8,
    ),
}


@pytest.mark.parametrize("model_type", SERVED)
@pytest.mark.filterwarnings("ignore")
def test_an_unlisted_model_is_served_if_paged_attention_computes_it(model_type, tmp_path):
    properties, num_kv_heads, head_dim = SERVED[model_type]
    save_checkpoint(tmp_path, COMMON | properties | {"model_type": model_type})
    (section,) = load_tiny(tmp_path).layout.sections
    assert (section.num_kv_heads, section.head_dim) == (num_kv_heads, head_dim)


def save_phimoe(path, sliding_window):
    """Saves a model whose window is only in the mask, not in the arguments of its attention."""
    extra = {"model_type": "phimoe", "num_local_experts": 2, "sliding_window": sliding_window}
    save_checkpoint(path, COMMON | extra)


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path):
    save_phimoe(tmp_path, 12)
    assert refusal(tmp_path) == (
        "config.json: the mask of layer 0 shows 12 tokens, but its attention is told 512; "
        f"{purpose.PAGE}"
    )


def test_a_window_that_only_the_cache_knows_is_refused(tmp_path):
    extra = {"model_type": "moshi", "sliding_window": 12, "ffn_dim": 48}
    save_checkpoint(tmp_path, COMMON | extra)
    assert refusal(tmp_path) == (
        "config.json: the cache of layer 0 keeps 12 tokens, but its attention is told 512; "
        f"{purpose.PAGE}"
    )


def test_a_window_as_long_as_the_context_hides_nothing(tmp_path):
    save_phimoe(tmp_path, COMMON["max_position_embeddings"])
    assert load_tiny(tmp_path).context_len == 512


@pytest.mark.parametrize("kv_format", KVFormat)
def test_a_model_is_tried_with_exact_kv_for_every_served_format(kv_format, tmp_path_factory):
    """With int4 KV, the logits would differ by far more than the check allows."""
    loaded = load(tiny_checkpoint(tmp_path_factory, "qwen3"), kv_format=kv_format, block_size=4)
    assert loaded.layout.kv_format is kv_format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_may_be_loaded_in_16_bits(dtype, tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "qwen2")
    loaded = load(path, kv_format=KVFormat.BF16, block_size=4, dtype=dtype)
    assert loaded.model.dtype == dtype


STORED = {  # kinds that store weights in different ways, or compute some of them
    "llama": {},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma3": {"tie_word_embeddings": True},
    "phi3": {},
    "gpt_neox": {},
    "mixtral": {},
    "qwen3_moe": {},
}
TOKENS = tuple((7 * i * i + 3) % 256 for i in range(30))


def save_stored(path, properties, dtype):
    """Saves a checkpoint in `dtype`, except for its norms, which stay in fp32."""
    save_checkpoint(path, properties)
    weights = load_file(path / WEIGHTS)
    weights = {k: w if "norm" in k else w.to(dtype) for k, w in weights.items()}
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    edit_config(path, dtype=str(dtype).removeprefix("torch."))
    return path


@pytest.fixture(params=STORED)
def half(request, tmp_path):
    properties = COMMON | KINDS.get(request.param, {}) | STORED[request.param]
    return save_stored(tmp_path, properties, torch.bfloat16)


def loaded_as(path, dtype=None):
    return load(path, kv_format=KVFormat.FP32, block_size=4, dtype=dtype)


def dtypes(loaded):
    return {x.dtype for x in loaded.model.parameters()}


def cache_of(loaded):
    return KVCache(loaded.layout, allocate_buffer(loaded.layout, 8))


def torch_logits(loaded):
    """Returns the logits of TOKENS, computed by the model's own code over paged KV."""
    cache = loaded.context.cache = cache_of(loaded)
    loaded.context.batch = build_batch([Row("a", TOKENS, 0, range(8), None)], cache)
    with torch.inference_mode():
        return forward(loaded.model, TOKENS, range(len(TOKENS)), range(len(TOKENS)))


def served_logits(loaded, weights):
    """Returns the logits of TOKENS in the way in which a worker computes them."""
    engine = CpuForward(loaded, weights, threads=1)
    engine.open(cache_of(loaded))
    try:
        with torch.inference_mode():
            row = Row("a", TOKENS, 0, range(8), None)
            return engine.logits([row], range(len(TOKENS))), engine.weights_bytes
    finally:
        engine.close()


@pytest.mark.parametrize("weights", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_weights_kept_as_stored_give_the_bits_of_fp32(half, weights):
    kept, cast = loaded_as(half), loaded_as(half, torch.float32)
    assert (dtypes(kept), dtypes(cast)) == ({torch.bfloat16, torch.float32}, {torch.float32})
    found, num_bytes = served_logits(kept, weights)
    expected, expected_bytes = served_logits(cast, weights)
    assert torch.equal(found, expected)
    assert (num_bytes, dtypes(kept)) == (expected_bytes, {torch.float32})


def test_a_model_computes_in_fp32_before_its_weights_are_packed(half):
    kept, cast = loaded_as(half), loaded_as(half, torch.float32)
    expected = torch_logits(cast)
    assert torch.equal(torch_logits(kept), expected)
    assert dtypes(kept) == {torch.bfloat16, torch.float32}
    stored.widen(kept.model)
    assert torch.equal(torch_logits(kept), expected)
    assert dtypes(kept) == {torch.float32}


def test_tensors_that_a_model_makes_itself_are_fp32(half):
    buffers, expected = (
        dict(loaded.model.named_buffers())
        for loaded in (loaded_as(half), loaded_as(half, torch.float32))
    )
    assert buffers.keys() == expected.keys()
    for name, values in expected.items():
        assert buffers[name].dtype == values.dtype
        assert torch.equal(buffers[name], values)


def test_fp16_weights_are_kept_too(tmp_path):
    save_stored(tmp_path, COMMON | KINDS["qwen2"], torch.float16)
    kept, cast = loaded_as(tmp_path), loaded_as(tmp_path, torch.float32)
    assert dtypes(kept) == {torch.float16, torch.float32}
    expected, _ = served_logits(cast, WeightFormat.FP32)
    assert torch.equal(served_logits(kept, WeightFormat.FP32)[0], expected)


def test_tied_weights_stay_tied_in_fp32(tmp_path):
    save_stored(tmp_path, COMMON | STORED["tied"], torch.bfloat16)
    model = loaded_as(tmp_path).model
    stored.widen(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.dtype is torch.float32


def test_a_model_has_one_fingerprint_in_every_dtype(half):
    assert loaded_as(half).fingerprint == loaded_as(half, torch.float32).fingerprint


def test_a_failed_module_gets_its_own_weights_back():
    linear = torch.nn.Linear(4, 4).bfloat16().requires_grad_(requires_grad=False)
    stored.widen_in_use(linear)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.zeros(2, 3))
    assert linear.weight.dtype is torch.bfloat16


MEASURE_PEAK = """
import sys
from pathlib import Path
import torch
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.model.loading.checkpoint import load
from engine.native.library import library
from engine.model.native.linear import Team, pack_linears

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

def pack(path):
    loaded = load(Path(path), kv_format=KVFormat.FP32, block_size=4)
    pack_linears(loaded.model, team, WeightFormat.INT8)

torch.set_num_threads(1)
team = Team(library(), 1)
small, large = sys.argv[1:]
pack(small)  # loads and compiles everything that is needed once
before = status("VmRSS")
pack(large)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_loading_and_packing_take_little_more_memory_than_the_file(tmp_path, tmp_path_factory):
    """For int8 the limit is 1.5 times the size of the file: the file, and the packed weights."""
    large = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "initializer_range": 0.02,
    }
    save_stored(tmp_path, COMMON | {"model_type": "llama"} | large, torch.bfloat16)
    small = tiny_checkpoint(tmp_path_factory, "llama")
    command = [sys.executable, "-c", MEASURE_PEAK, str(small), str(tmp_path)]
    peak_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    file_bytes = (tmp_path / WEIGHTS).stat().st_size
    assert peak_bytes < 1.9 * file_bytes


def test_int4_is_refused_for_a_model_whose_heads_are_odd(tmp_path):
    """Each head has nine elements."""
    save_checkpoint(tmp_path, COMMON | {"model_type": "gpt_neox", "hidden_size": 36})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, kv_format=KVFormat.INT4, block_size=4)
    assert str(caught.value) == "config.json: head_dim is 9: int4 needs an even head_dim"
    int8 = load(tmp_path, kv_format=KVFormat.INT8, block_size=4)
    assert int8.layout.sections[0].head_dim == 9


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


@pytest.fixture
def absent(monkeypatch):
    """Makes packages look absent, even if they are installed."""

    def hide(*names):
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: None if name in names else real(name, *rest),
        )

    return hide


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ({"quant_method": "awq", "bits": 4}, ["accelerate", "gptqmodel"]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ["accelerate", "bitsandbytes"]),
        ({"load_in_4bit": True}, ["accelerate", "bitsandbytes"]),
        ({"quant_method": "compressed-tensors"}, ["compressed-tensors"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ["accelerate"]),
        ({"quant_method": "gptq", "bits": 4}, ["gptqmodel", "optimum"]),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, ["torchao"]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else None,
)
def test_missing_packages_for_quantised_weights_are_named(method, packages, llama, absent):
    edit_config(llama, quantization_config=method)
    absent(*(name.replace("-", "_") for name in packages))
    name = method.get("quant_method", "bitsandbytes")
    assert refusal(llama) == (
        f"weights quantised with {name} cannot be loaded: not installed: {', '.join(packages)}"
    )


def test_only_absent_packages_are_named(llama, absent):
    edit_config(llama, quantization_config={"quant_method": "torchao"})
    absent("torchao", "nonesuch")
    assert refusal(llama).endswith("not installed: torchao")


@pytest.mark.skipif(importlib.util.find_spec("hqq") is not None, reason="hqq is installed")
def test_other_methods_leave_missing_packages_to_transformers(llama):
    edit_config(llama, quantization_config={"quant_method": "hqq", "quant_config": {}})
    assert "hqq" in refusal(llama).lower()


def test_a_quantisation_that_transformers_would_ignore_is_refused(llama):
    edit_config(llama, quantization_config={"quant_method": "nonesuch"})
    assert refusal(llama) == "config.json: quant_method 'nonesuch' is unknown to transformers"
    edit_config(llama, quantization_config={"bits": 4})
    assert refusal(llama) == "config.json: quantization_config has no quant_method"


@pytest.mark.parametrize(
    "part", ["weight_scale", "weight_scale_inv", "weight_packed", "qweight", "weight.absmax"]
)
@pytest.mark.parametrize("is_beside", [True, False])
def test_quantised_weights_without_a_method_are_named_so(llama, part, is_beside):
    weights = load_file(llama / WEIGHTS)
    name = "model.layers.0.mlp.up_proj"
    if not is_beside:
        del weights[f"{name}.weight"]
    weights[f"{name}.{part}"] = torch.ones(2)
    save_file(weights, llama / WEIGHTS, metadata={"format": "pt"})
    assert refusal(llama) == (
        f"{llama}: its weights are quantised ({name}.{part}), but config.json does not say how in "
        "a quantization_config"
    )


def test_unquantised_weights_have_no_method(llama):
    assert load_tiny(llama).quant_method is None


def test_safetensors_take_precedence_over_a_gguf_file(llama):
    (llama / "model-q8_0.gguf").write_bytes(b"GGUF")
    assert load_tiny(llama).quant_method is None


def mark(path, *, dtype="float32"):
    return fingerprint(path, dtype=dtype)


def test_a_copy_has_the_same_fingerprint(llama, tmp_path_factory):
    assert mark(llama) == mark(tiny_checkpoint(tmp_path_factory, "llama"))
    assert len(mark(llama)) == 16
    assert int(mark(llama), 16) >= 0
    edit_config(llama, transformers_version="0.0", _name_or_path="elsewhere")
    assert mark(llama) == mark(tiny_checkpoint(tmp_path_factory, "llama"))


def test_the_fingerprint_depends_on_the_type_of_the_weights(llama):
    assert mark(llama) != mark(llama, dtype="bfloat16")


def test_the_fingerprint_does_not_depend_on_the_format_of_kv(llama):
    """Workers that convert KV during transfer serve the same model."""
    held = [load_tiny(llama, kv_format) for kv_format in (KVFormat.FP32, KVFormat.INT8)]
    assert held[0].layout != held[1].layout
    assert held[0].fingerprint == held[1].fingerprint


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
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1  # only values change
    save_file(weights, llama / WEIGHTS)
    marks.append(mark(llama))
    assert len(set(marks)) == len(marks)


def test_files_can_be_checked_without_loading_them(llama):
    check_files(llama)
    header = read_header(llama / WEIGHTS)
    assert header["lm_head.weight"]["shape"] == [260, 32]
