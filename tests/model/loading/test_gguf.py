"""Weights of GGUF files: the arithmetic of each type, and whole models that equal transformers'."""

import random
import struct

import pytest
import torch
from safetensors.torch import load_file

from deploy.fetching.gguf import folder_of_gguf
from engine.errors import CheckpointError
from engine.gguf.container import read_gguf
from engine.layout import KVFormat
from engine.model.loading.checkpoint import load
from engine.model.loading.files import check_files, fingerprint
from engine.model.loading.gguf import in_halves, read_tensor
from tests.kits.checkpoints import COMMON, save_checkpoint
from tests.kits.models.gguf import Contents, tiny
from tests.kits.models.served import Served, edit_config, generate, prompt

BLOCK_LEN = 32
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def half(data):
    return struct.unpack("<e", data)[0]


def nibbles(data):
    return [byte % 16 for byte in data] + [byte // 16 for byte in data]


def q8_0(block):
    return [half(block[:2]) * q for q in struct.unpack("<32b", block[2:])]


def q4_0(block):
    return [half(block[:2]) * (q - 8) for q in nibbles(block[2:])]


def q4_1(block):
    return [half(block[:2]) * q + half(block[2:4]) for q in nibbles(block[4:])]


def some_blocks(num_halves, num_bytes, *, number=6):
    rng = random.Random(3)
    return [
        struct.pack(f"<{num_halves}e", *(rng.uniform(-2, 2) for _ in range(num_halves)))
        + bytes(rng.choice((0, 255, 128, rng.randrange(256))) for _ in range(num_bytes))
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    ("kind", "values_of", "blocks"),
    [
        ("Q8_0", q8_0, some_blocks(1, 32)),
        ("Q4_0", q4_0, some_blocks(1, 16)),
        ("Q4_1", q4_1, some_blocks(2, 16)),
    ],
)
def test_blocks_hold_the_values_that_the_format_defines(kind, values_of, blocks, tmp_path):
    shape = (3, 2 * BLOCK_LEN)
    path = Contents({}, {"t": (kind, shape, b"".join(blocks))}).write(tmp_path / "a.gguf")
    found = read_tensor(path, read_gguf(path).tensors["t"])
    expected = torch.tensor([values_of(block) for block in blocks], dtype=torch.float64)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.reshape(shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_plain_numbers_keep_their_type_and_bits(kind, dtype, tmp_path):
    values = torch.linspace(-3, 3, 35).to(dtype).reshape(5, 7)
    data = values.view(torch.uint8).numpy().tobytes()
    path = Contents({}, {"t": (kind, (5, 7), data)}).write(tmp_path / "a.gguf")
    found = read_tensor(path, read_gguf(path).tensors["t"])
    assert found.dtype == dtype
    assert torch.equal(found, values)


def in_pairs(rows, num_heads):
    """Returns the rows of each head in llama.cpp's order of rotation, pair by pair: a0 b0 a1 b1
    …
    """
    size = len(rows) // num_heads
    pairs = [(i, i + size // 2) for i in range(size // 2)]
    return rows[[h * size + i for h in range(num_heads) for pair in pairs for i in pair]]


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rows_of_rotated_heads_are_put_back(shape, num_heads):
    rows = torch.randn(shape)
    assert torch.equal(in_halves(in_pairs(rows, num_heads), num_heads), rows)


def gguf_name(name):
    stem, _, ending = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{ending}"


@pytest.fixture
def saved(tmp_path):
    """Saves a checkpoint of random weights, and the same model as a GGUF file."""

    def save(architecture, **properties):
        contents = tiny(architecture)
        shape = {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": 261}
        path = tmp_path / "safetensors"
        save_checkpoint(path, COMMON | shape | {"model_type": architecture} | properties)
        contents.tensors = {}
        for name, weight in load_file(path / "model.safetensors").items():
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                weight = in_pairs(weight, 4 if "q_proj" in name else 2)
            data = weight.float().contiguous().numpy().tobytes()
            contents.tensors[gguf_name(name)] = ("F32", tuple(weight.shape), data)
        contents.values[f"{architecture}.attention.layer_norm_rms_epsilon"] = 1e-6
        file = contents.write(tmp_path / "tiny.gguf")
        return path, folder_of_gguf(file, (), cache=tmp_path / "cache")

    return save


@pytest.mark.parametrize(
    ("architecture", "properties"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {})],
)
def test_a_gguf_file_answers_like_its_checkpoint(architecture, properties, saved):
    path, folder = saved(architecture, **properties)
    check_files(folder)
    ids = prompt(40)
    with Served(folder) as served:
        assert served.answer(ids, 12) == generate(path, ids, 12)


@pytest.fixture
def folder(tmp_path):
    return folder_of_gguf(tiny().write(tmp_path / "tiny.gguf"), (), cache=tmp_path / "cache")


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        load(path, kv_format=KVFormat.FP32, block_size=16)
    return str(caught.value)


def test_a_corrupted_file_is_named_before_anything_is_loaded(folder):
    file = folder / "tiny.gguf"
    file.resolve().write_bytes(b"GGU")
    assert refusal(folder) == f"{file}: corrupted: not a GGUF file"


def test_several_files_are_refused(folder):
    tiny().write(folder / "other.gguf")
    assert refusal(folder) == f"{folder}: 2 *.gguf files: only one is allowed"


def test_a_config_that_contradicts_the_file_is_refused(folder):
    edit_config(folder, intermediate_size=64)
    assert "mlp.down_proj.weight has shape [32, 48], config.json says [32, 64]" in refusal(folder)


def test_the_fingerprint_changes_with_the_file(folder):
    file = (folder / "tiny.gguf").resolve()
    data = bytearray(file.read_bytes())
    marks = [fingerprint(folder, dtype="float32")]
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    marks.append(fingerprint(folder, dtype="float32"))
    file.write_bytes(data + b"\0")
    marks.append(fingerprint(folder, dtype="float32"))
    assert len(set(marks)) == 3
