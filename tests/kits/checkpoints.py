"""Tiny checkpoints with random weights, one for each kind of model that the tests serve.

    path = tiny_checkpoint(tmp_path_factory, "llama")

Weights come from a fixed seed and are large enough that greedy answers do not settle on one token.
The tokenizer has one token per byte, and a chat template, so every checkpoint can serve any text.
"""

import json
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SPECIAL_TOKENS = ("<bos>", "<eos>", "<turn>")
VOCAB_SIZE = (
    256 + len(SPECIAL_TOKENS) + 1
)  # one id that no text uses; the size need not be a multiple of 4
CONTEXT_LEN = 512
SLIDING_WINDOW = 12

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

# Model kinds whose answers must equal transformers' token for token in continuous integration.
KINDS = {
    "llama": {"model_type": "llama", "head_dim": 8},
    "qwen2": {  # biases of Q, K and V; sliding windows in all layers but the first
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": SLIDING_WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": SLIDING_WINDOW},
    "mixtral": {
        "model_type": "mixtral",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": LAYER_TYPES,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": LAYER_TYPES,
    },
    "phi3": {"model_type": "phi3"},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
}

# Kinds with their own experts and gates or with `Conv1D`, besides linear layers.
OWN_CODE = {
    "qwen2_moe": COMMON
    | {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "jetmoe": COMMON
    | {
        "model_type": "jetmoe",
        "kv_channels": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": CONTEXT_LEN,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_inner": 56,
        "n_positions": CONTEXT_LEN,
        "initializer_range": 0.3,
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
}

# Not in the kinds above: K, V and context length as in Llama-3.2-1B; other sizes are tiny.
LLAMA_1B_KV = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}


def tiny_checkpoint(tmp_path_factory, kind: str) -> Path:
    """Returns the folder of a checkpoint of this kind, made once per test session; do not write to
    it."""
    return _saved(tmp_path_factory.getbasetemp(), kind)


@cache
def _saved(base: Path, kind: str) -> Path:
    path = base / "checkpoints" / kind
    save_checkpoint(path, COMMON | KINDS[kind])
    return path


def save_checkpoint(path: Path, properties: dict, *, seed: int = 0) -> None:
    """Saves a model with this config and random weights, and a tokenizer."""
    properties = dict(properties)
    config = AutoConfig.for_model(properties.pop("model_type"), **properties)
    sees = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config)
        randomise_vectors(model)
    model.generation_config.pad_token_id = 257
    model.save_pretrained(path)
    save_tokenizer(path)


@torch.no_grad()
def randomise_vectors(model: torch.nn.Module) -> None:
    """Adds noise to norms and biases: their initial ones and zeros would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))


def make_embedding(path: Path, **of_config: object) -> None:
    """Turns a saved checkpoint into an embedding model, in the files of sentence-transformers."""
    types = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"models.{name}"}
        for i, name in enumerate(types)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = json.loads((path / "config.json").read_text()) | of_config
    (path / "config.json").write_text(json.dumps(config))


def save_tokenizer(path: Path) -> None:
    """Saves tokenizer.json and tokenizer_config.json: byte b is token b."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {text: i for i, text in enumerate(_byte_texts())}
    assert sorted(by_byte) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab=by_byte, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for message in messages %}<turn>{{ message.role }}: {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": template,
        "model_max_length": CONTEXT_LEN,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _byte_texts() -> list[str]:
    """Returns the byte-level letter of each byte: itself if printable, else from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (b for b in range(256) if b not in printable)
    texts = {b: chr(256 + i) for i, b in enumerate(others)} | {b: chr(b) for b in printable}
    return [texts[b] for b in range(256)]
