"""Translates the key/values and tensors of a GGUF file to the names of transformers.

A file with an unknown architecture key, an unknown tensor or an unexpected shape is refused, with
an error that names it. So a model is computed as its authors intended, or not at all.

llama.cpp rotates pairs of neighbouring elements, transformers rotates the halves of a head. For
`llama`, llama.cpp's converter therefore reorders the rows of Q and K (`WeightPlace.rotated_heads`).
For other architectures it does not.

Llama 3 scales its rotary embeddings. llama.cpp's converter computes a factor for each frequency
from four parameters, and stores only the factors. transformers needs the parameters. All models of
this kind have the same values for three of the parameters; the fourth is the largest factor.

`described` turns the metadata of a GGUF file into the small files of a transformers checkpoint:

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json

The weights stay in the GGUF file (`weights_of`). Equal files give equal bytes, on every machine.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import CheckpointError
from engine.gguf.container import GgufHeader, TensorPlace, Value
from engine.gguf.vocabulary import special_ids, tokenizer_config_of, tokenizer_of

MAX_SIZE = 2**24  # largest allowed size of a dimension
FREQUENCIES = "rope_freqs.weight"  # tensor with the factors of the rotary frequencies
HEAD = "output.weight"  # the output head; absent if the model uses the embedding matrix as its head

_WHOLE = {  # tensors outside layers: GGUF name, transformers' name and shape
    "token_embd.weight": ("model.embed_tokens.weight", ("vocab", "hidden")),
    "output_norm.weight": ("model.norm.weight", ("hidden",)),
    HEAD: ("lm_head.weight", ("vocab", "hidden")),
}
_COMMON = {  # the tensors of a layer
    "attn_norm.weight": ("input_layernorm.weight", ("hidden",)),
    "attn_q.weight": ("self_attn.q_proj.weight", ("q", "hidden")),
    "attn_k.weight": ("self_attn.k_proj.weight", ("kv", "hidden")),
    "attn_v.weight": ("self_attn.v_proj.weight", ("kv", "hidden")),
    "attn_output.weight": ("self_attn.o_proj.weight", ("hidden", "q")),
    "ffn_norm.weight": ("post_attention_layernorm.weight", ("hidden",)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", ("ffn", "hidden")),
    "ffn_up.weight": ("mlp.up_proj.weight", ("ffn", "hidden")),
    "ffn_down.weight": ("mlp.down_proj.weight", ("hidden", "ffn")),
}
_BIASES = {
    "attn_q.bias": ("self_attn.q_proj.bias", ("q",)),
    "attn_k.bias": ("self_attn.k_proj.bias", ("kv",)),
    "attn_v.bias": ("self_attn.v_proj.bias", ("kv",)),
}
_HEAD_NORMS = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", ("head",)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", ("head",)),
}
_KEYS = frozenset(  # known keys of an architecture
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length"),
        *("vocab_size", "expert_count", "expert_used_count"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "attention.layer_norm_rms_epsilon"),
        *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
    }
)


@dataclass(frozen=True, slots=True)
class _Family:
    class_name: str
    layer: Mapping[str, tuple[str, tuple[str, ...]]]
    is_rotated: bool = False  # True if llama.cpp's converter reorders the rows of Q and K


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", _COMMON, is_rotated=True),
    "qwen2": _Family("Qwen2ForCausalLM", _COMMON | _BIASES),
    "qwen3": _Family("Qwen3ForCausalLM", _COMMON | _HEAD_NORMS),
}


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The GGUF tensor of one weight of transformers' model."""

    tensor: TensorPlace
    # number of heads whose rows are in llama.cpp's order; None: the rows are not reordered
    rotated_heads: int | None = None


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of config.json, without token ids.

    Raises CheckpointError for unknown metadata, or metadata that contradicts other metadata.
    """
    return _Described(header).config()


def weights_of(header: GgufHeader) -> dict[str, WeightPlace]:
    """Returns the tensor of each weight, by transformers' names. Raises CheckpointError."""
    return _Described(header).weights()


class _Described:
    """The header of a GGUF file, read as a model of its architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header, self._path = header, header.path
        self._name = str(header.values.get("general.architecture", ""))
        if header.values.get("general.type", "model") != "model":
            raise self._refused(f"general.type is {header.values['general.type']!r}, not a model")
        if self._name not in _FAMILIES:
            raise self._refused(
                f"its architecture is {self._name!r:.80}; read are {', '.join(_FAMILIES)}"
            )
        self._family = _FAMILIES[self._name]
        self._require_known_keys()
        self._heads = self._size("attention.head_count")
        self._kv_heads = self._size("attention.head_count_kv", self._heads)
        hidden = self._size("embedding_length")
        self._head_dim = self._size("attention.key_length", max(hidden // self._heads, 1))
        self._num_layers = self._size("block_count")
        self._sizes = {
            "hidden": hidden,
            "head": self._head_dim,
            "q": self._heads * self._head_dim,
            "kv": self._kv_heads * self._head_dim,
            "ffn": self._size("feed_forward_length"),
            "vocab": self._vocab_size(),
        }

    def config(self) -> dict[str, Any]:
        self.weights()
        return {
            "architectures": [self._family.class_name],
            "model_type": self._name,
            "hidden_act": "silu",
            "hidden_size": self._sizes["hidden"],
            "intermediate_size": self._sizes["ffn"],
            "num_hidden_layers": self._num_layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self._decimal("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": HEAD not in self._header.tensors,
            "vocab_size": self._sizes["vocab"],
        }

    def weights(self) -> dict[str, WeightPlace]:
        tensors = self._header.tensors
        found: dict[str, WeightPlace] = {}
        for name in self._expected():
            if name not in tensors:
                raise self._refused(f"has no tensor {name}")
            target, dims = self._named(name)
            if tensors[name].shape != (shape := tuple(self._sizes[dim] for dim in dims)):
                raise self._refused(
                    f"{name} has shape {list(tensors[name].shape)}, its metadata says {list(shape)}"
                )
            found[target] = WeightPlace(tensors[name], self._rotated_heads(name))
        if left := tensors.keys() - set(self._expected()) - {FREQUENCIES}:
            raise self._refused(f"{self._name} has no place for the tensor {min(left):.80}")
        return found

    def _expected(self) -> list[str]:
        """Returns the names of all tensors that the model must have."""
        if self._num_layers * len(self._family.layer) > len(self._header.tensors):
            raise self._refused(f"{self._key('block_count')} is more than it has tensors for")
        layers = [f"blk.{i}.{name}" for i in range(self._num_layers) for name in self._family.layer]
        is_tied = HEAD not in self._header.tensors
        return [*(name for name in _WHOLE if name != HEAD or not is_tied), *layers]

    def _named(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns transformers' name for a tensor, and the names of its dimensions."""
        if name in _WHOLE:
            return _WHOLE[name]
        _, layer, part = name.split(".", 2)
        target, dims = self._family.layer[part]
        return f"model.layers.{layer}.{target}", dims

    def _rotated_heads(self, name: str) -> int | None:
        if not self._family.is_rotated:
            return None
        part = name.rpartition(".")[0].rpartition(".")[2]
        return {"attn_q": self._heads, "attn_k": self._kv_heads}.get(part)

    def _require_known_keys(self) -> None:
        prefix = f"{self._name}."
        own = [key for key in self._header.values if key.startswith(prefix)]
        unknown = sorted(key for key in own if key.removeprefix(prefix) not in _KEYS)
        if unknown:
            raise self._refused(f"{unknown[0]:.80} is not supported")
        if self._value("expert_count", 0) != 0:
            raise self._refused(f"{prefix}expert_count: mixtures of experts are not read from GGUF")

    def _vocab_size(self) -> int:
        embedding = self._header.tensors.get("token_embd.weight")
        if embedding is None:
            raise self._refused("has no tensor token_embd.weight")
        if self._value("vocab_size", embedding.shape[0]) != embedding.shape[0]:
            raise self._refused(
                f"{self._key('vocab_size')} is not the number of rows of the embedding"
            )
        return embedding.shape[0]

    def _rope(self) -> dict[str, Any]:
        """Returns `rope_parameters`. Raises CheckpointError for an unknown kind of rotary
        embedding.
        """
        for key in ("rope.dimension_count", "attention.value_length"):
            if self._value(key, self._head_dim) != self._head_dim:
                raise self._refused(f"{self._key(key)} is not the heads' size, {self._head_dim}")
        found: dict[str, Any] = {"rope_type": self._value("rope.scaling.type", "none")}
        found["rope_theta"] = self._decimal("rope.freq_base", 10_000.0)
        if FREQUENCIES in self._header.tensors:
            return found | self._stretched(found["rope_theta"])
        if found["rope_type"] == "none":
            return found | {"rope_type": "default"}
        if found["rope_type"] not in ("linear", "yarn"):
            raise self._refused(f"{self._key('rope.scaling.type')} is {found['rope_type']!r}")
        found["factor"] = self._decimal("rope.scaling.factor")
        if found["rope_type"] == "yarn":
            original = self._size("rope.scaling.original_context_length")
            found["original_max_position_embeddings"] = original
        return found

    def _stretched(self, theta: float) -> dict[str, Any]:
        """Returns the rope parameters from which llama.cpp has computed the stored frequency
        factors.
        """
        place = self._header.tensors[FREQUENCIES]
        found = None
        if place.type_name == "F32" and place.shape == (self._head_dim // 2,):
            factors = np.fromfile(self._path, "<f4", place.shape[0], offset=place.begin)
            found = parameters_of(factors.tolist(), theta)
        if found is None:
            raise self._refused(f"{FREQUENCIES} fits no known rotary embedding")
        return found

    def _decimal(self, key: str, default: float | None = None) -> float:
        """Rounds away the decimal digits that storage as fp32 has added to a number."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._refused(f"{self._key(key)} is {value!r}")
        return float(f"{value:.7g}")

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
            raise self._refused(f"{self._key(key)} is {_said(value)}")
        return value

    def _value(self, key: str, default: Value | None) -> Value | None:
        return self._header.values.get(self._key(key), default)

    def _key(self, key: str) -> str:
        return f"{self._name}.{key}"

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}")


def _said(value: Value | None) -> str:
    if value is None:
        return "missing"
    return f"a list of {len(value)} values" if isinstance(value, Sequence) else repr(value)


ORIGINAL_CONTEXT_LEN, LOW, HIGH = 8192, 1.0, 4.0
TOLERANCE = 1e-4  # largest relative error of a factor that is stored in fp32


def parameters_of(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Returns the rope parameters that produce these factors; None if no known parameters do."""
    if not all(1 <= factor < math.inf for factor in factors):
        return None
    factor = round(max(factors), 3)
    if factor == 1:
        return {"rope_type": "default"}
    expected = _factors(len(factors), theta, factor)
    if any(abs(a - b) > TOLERANCE * b for a, b in zip(factors, expected, strict=True)):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL_CONTEXT_LEN,
    }


def _factors(number: int, theta: float, factor: float) -> list[float]:
    turns = [  # full rotations of each frequency over the length of the original context
        ORIGINAL_CONTEXT_LEN / (2 * math.pi * theta ** (i / number)) for i in range(number)
    ]
    shares = [min(max((turn - LOW) / (HIGH - LOW), 0.0), 1.0) for turn in turns]
    return [1 / ((1 - share) / factor + share) for share in shares]


def described(header: GgufHeader) -> dict[str, bytes]:
    """Returns the contents of the transformers files, by file name. Raises CheckpointError."""
    config, ids, tokenizer = config_of(header), special_ids(header), tokenizer_of(header)
    if len(tokenizer["model"]["vocab"]) != config["vocab_size"]:
        raise CheckpointError(
            f"{header.path}: lists {len(tokenizer['model']['vocab'])} tokens,"
            f" and embeds {config['vocab_size']}"
        )
    contents = {
        "config.json": config | ids,
        "generation_config.json": ids,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config_of(header),
    }
    return {name: json.dumps(each, ensure_ascii=False).encode() for name, each in contents.items()}
