"""Checkpoints of named shapes with random weights, for measuring speed. No torch.

    path = cached_checkpoint("88m", seed=0)      ~/.cache/baton/bench/88m-<hash>

A checkpoint is a Llama as transformers saves it: config.json, generation_config.json, one
model.safetensors in bf16, and a tokenizer with a text for every id. Norms are one, and matrix
elements are normally distributed with variance 1 / inputs. So activations, attention scores and
logits are of the order of one, like those of trained models. An engine that confuses heads or
positions gives wrong answers.

The speed of an engine does not depend on the weights' values. Its answers have no meaning.

    pair = cached_pair("88m", seed=0)                   target, draft, stranger

The speed of speculation does depend on the values: a draft must agree with its target as often as a
trained draft, and repeated text must lead to repeated tokens. So the draft consists of parts of the
target: its embedding, first layer, last norm and output matrix. The target differs from a
checkpoint of `make_checkpoint` in three scales:

    late MLPs       scaled down until the draft chooses the same token about four times in five
    attention       scaled down in all layers, so that the next token depends mostly on the last
                    one: a repeated question gets a repeated answer
    output matrix   scaled up, so that probabilities are as uneven as in trained models, and
                    noise of temperature 0.7 does not hide the draft's errors

The draft takes as long as any draft of its size, and the target as long as any model of its shape.
How often draft and target agree must be measured. The `stranger` has the draft's shape and
unrelated weights.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.common.roofline import ModelSize
from engine.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM_EPS = 1e-5
ROPE_THETA = 10_000.0
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
FORMAT = 1  # format of the checkpoints; increase it when the files of a given shape and seed change

DRAFT_LAYERS = 1

Tensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense Llama whose output matrix is not its embedding."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int

    @property
    def size(self) -> ModelSize:
        """Returns the sizes that determine the model's speed."""
        attention_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * attention_size + 2 * kv_size + 3 * self.ffn_size)
        return ModelSize(
            num_layers=self.num_layers,
            attention_size=attention_size,
            layer_weights=self.num_layers * layer,
            head_weights=self.vocab_size * self.hidden_size,
        )


SHAPES = {
    "88m": Shape(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=2048,
        vocab_size=8192,
        max_positions=4096,
    ),
    "tiny": Shape(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        # smallest size that every engine serves; llama.cpp quantises 32 weights together
        head_dim=32,
        ffn_size=128,
        vocab_size=512,
        max_positions=4096,
    ),
}


@dataclass(frozen=True, slots=True)
class Gains:
    """Factors on the weights of a pair's target, relative to a checkpoint of `make_checkpoint`."""

    attention: float = 0.02  # factor of attention's output in every layer
    late_mlps: float = 0.2  # factor of the MLPs' outputs in the layers that the draft does not have
    logits: float = 4.0

    def of(self, name: str, num_layers: int) -> float:
        """Returns the factor of one tensor in a model of `num_layers` layers."""
        if name == HEAD:
            return self.logits
        if name.endswith("o_proj.weight"):
            return self.attention
        if name.endswith("down_proj.weight") and int(name.split(".")[2]) >= DRAFT_LAYERS:
            return self.late_mlps / math.sqrt(num_layers - DRAFT_LAYERS)
        return 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """The choice of a checkpoint's weights: all layers of `shape`, or only the first layers."""

    shape: Shape
    seed: int
    gains: Gains | None = None  # None: all gains are one
    num_kept_layers: int | None = None  # number of first layers to keep; None: all

    @property
    def kept_shape(self) -> Shape:
        """Returns the shape of the checkpoint, with the kept layers only."""
        if self.num_kept_layers is None:
            return self.shape
        return replace(self.shape, num_layers=self.num_kept_layers)

    def gain(self, name: str) -> float:
        """Returns the factor of this tensor's weights, by its name."""
        return 1.0 if self.gains is None else self.gains.of(name, self.shape.num_layers)


@dataclass(frozen=True, slots=True)
class Pair:
    """The folders of a target, of a draft that agrees with the target, and of a draft that does
    not.
    """

    target: Path
    draft: Path
    stranger: Path


def shape_named(name: str) -> Shape:
    """Returns the shape with this name. Raises ConfigError, which lists the names."""
    if name not in SHAPES:
        raise ConfigError(f"--shape {name!r} is none of {', '.join(SHAPES)}")
    return SHAPES[name]


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for files that benchmarks make: `$XDG_CACHE_HOME/baton/bench`."""
    base = environment.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "baton" / "bench"


def cached_checkpoint(name: str, seed: int, *, cache: Path | None = None) -> Path:
    """Returns the folder of the checkpoint for this shape and seed. Makes the checkpoint if it is
    missing.
    """
    return _cached(name, Recipe(shape_named(name), seed), cache or cache_dir())


def cached_pair(name: str, seed: int, *, cache: Path | None = None) -> Pair:
    """Returns the folders of a target of this shape and of its drafts. Makes checkpoints that are
    missing.
    """
    folder = cache or cache_dir()
    target = Recipe(shape_named(name), seed, Gains())
    draft = replace(target, num_kept_layers=DRAFT_LAYERS)
    return Pair(
        target=_cached(f"{name}-target", target, folder),
        draft=_cached(f"{name}-draft", draft, folder),
        stranger=_cached(f"{name}-stranger", replace(draft, seed=seed + 1), folder),
    )


def make_checkpoint(path: Path, shape: Shape, seed: int) -> None:
    """Writes a checkpoint without gains, so all layers have the same scales."""
    write_checkpoint(path, Recipe(shape, seed))


def write_checkpoint(path: Path, recipe: Recipe) -> None:
    """Writes the checkpoint. `path` is either complete or absent, even if two processes write at
    once.
    """
    shape = recipe.kept_shape
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        _write_json(scratch / "config.json", config_of(shape))
        generation = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}
        _write_json(scratch / "generation_config.json", generation)
        tokenizer_of(shape.vocab_size).save(str(scratch / "tokenizer.json"))
        _write_json(scratch / "tokenizer_config.json", _tokenizer_config(shape))
        _write_weights(scratch / "model.safetensors", recipe)
        scratch.chmod(0o755)
        _move(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def config_of(shape: Shape) -> dict[str, object]:
    """Returns the content of config.json, with the names that transformers 4 and 5 and vLLM
    read.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def tensors_of(shape: Shape) -> Iterator[Tensor]:
    """Returns the name and shape of every tensor in file order. Matrices are [out, in]."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield EMBEDDING, (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (heads, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv_heads, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv_heads, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, heads)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (ffn, hidden)
        yield prefix + "mlp.up_proj.weight", (ffn, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield HEAD, (shape.vocab_size, hidden)


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """Makes a byte-level BPE tokenizer of exactly `vocab_size` ids: special tokens, bytes, pairs of
    bytes.

    Raises ConfigError if no such tokenizer exists.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab_size - len(SPECIAL_TOKENS) - len(alphabet)
    if not 0 <= num_pairs <= len(alphabet) ** 2:
        raise ConfigError(f"no tokenizer for a vocabulary of {vocab_size}")
    return tokenizer_over(alphabet, num_pairs)


def tokenizer_over(alphabet: Sequence[str], num_pairs: int) -> Tokenizer:
    """Makes a byte-level BPE tokenizer of special tokens, the letters of this alphabet, and pairs
    of letters.
    """
    pairs = list(islice(product(alphabet, alphabet), num_pairs))
    texts = [*SPECIAL_TOKENS, *alphabet, *map("".join, pairs)]
    vocab = {text: token_id for token_id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds fp32 to bf16 (to nearest, ties to even). Returns the bits as uint16. Infinities are
    not supported.
    """
    bits = values.astype("<f4").view("<u4")
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    high: np.ndarray = (rounded >> 16).astype("<u2")
    return high


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        **names,
    }


def _write_weights(path: Path, recipe: Recipe) -> None:
    """Writes a safetensors file: length of the header (8 bytes), header (JSON), tensors."""
    kept = dict(tensors_of(recipe.kept_shape))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in kept.items():
        begin, end = end, end + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # padding: tensors start at a multiple of 8 bytes
    rng = np.random.default_rng(recipe.seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors_of(recipe.shape):
            # Values are drawn even for tensors that are left out, so that later tensors stay the
            # same.
            values = _values(name, size, rng)
            if name in kept:
                file.write(to_bfloat16(values * np.float32(recipe.gain(name))).tobytes())


def _values(name: str, size: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if len(size) == 1:
        return np.ones(size, dtype=np.float32)
    num_inputs = size[1] if name != EMBEDDING else 1
    return rng.standard_normal(size, dtype=np.float32) * np.float32(num_inputs**-0.5)


def _cached(name: str, recipe: Recipe, cache: Path) -> Path:
    path = cache / f"{name}-{blake2b(_key(recipe), digest_size=6).hexdigest()}"
    if not path.is_dir():
        write_checkpoint(path, recipe)
    return path


def _key(recipe: Recipe) -> bytes:
    """Returns a key of everything that determines the files. Without gains, keys have the
    oldest form, so that existing files stay valid.
    """
    parts: list[object] = [FORMAT, recipe.seed, asdict(recipe.shape)]
    if recipe.gains is not None or recipe.num_kept_layers is not None:
        gains = None if recipe.gains is None else asdict(recipe.gains)
        parts.append([DRAFT_LAYERS, gains, recipe.num_kept_layers])
    return json.dumps(parts).encode()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _move(scratch: Path, path: Path) -> None:
    try:
        scratch.rename(path)
    except OSError:
        if not path.is_dir():  # if the folder exists, another process has written the same files
            raise
