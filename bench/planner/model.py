"""Computes the bytes of a dense decoder's weights and KV from its config.json. Needs no torch.

With L layers of hidden size d, h query heads and h_kv KV heads of d_h, an MLP of three matrices of
f, and a vocabulary of V:

    layers     L·(2·d·h·d_h + 2·d·h_kv·d_h + 3·d·f)
    head       V·d, read by every step
    embedding  V·d, only looked up; if tied, head and embedding are one matrix
    KV         2·L·h_kv·d_h elements per token, and the scales of the format (`engine.layout`)

Norms and biases are left out, because they are only a thousandth. 8-bit formats apply to the
layers' matrices. Head and embedding stay in bf16, like in most quantised checkpoints.

Models with experts or MLA raise errors, since the formulas do not fit them. Sliding windows count
as the whole context, which overestimates their KV.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import WeightFormat
from engine.errors import CheckpointError, ConfigError
from engine.layout import KVFormat, KVLayout, KVSection

BF16_BYTES = 2
LAYER_BYTES = {  # bytes of one weight, by format
    WeightFormat.BF16: BF16_BYTES,
    WeightFormat.FP8: 1,
    WeightFormat.INT8: 1,
}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_MLA_KEY = "kv_lora_rank"


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The sizes of a dense decoder with a gated MLP."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    max_positions: int | None = None

    @property
    def layer_weights(self) -> int:
        """Returns the number of weights in the matrices of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        """Returns the number of weights in the output matrix."""
        return self.vocab * self.hidden

    @property
    def num_weights(self) -> int:
        """Returns the number of weights in all matrices. A tied matrix counts once."""
        return self.layer_weights + self.head_weights * (1 if self.tied else 2)

    def read_bytes(self, weights: WeightFormat) -> int:
        """Returns the bytes that a step reads: all matrices except the embedding."""
        return self.layer_weights * LAYER_BYTES[weights] + self.head_weights * BF16_BYTES

    def held_bytes(self, weights: WeightFormat) -> int:
        """Returns the bytes of the weights in memory."""
        embedding = 0 if self.tied else self.head_weights * BF16_BYTES
        return self.read_bytes(weights) + embedding

    def kv_layout(self, kv_format: KVFormat, *, block_size: int, ranks: int = 1) -> KVLayout:
        """Returns the KV layout of all ranks. If there are more ranks than KV heads, heads are
        repeated.
        """
        section = KVSection(self.layers, max(self.kv_heads, ranks), self.head_dim)
        return KVLayout(block_size, kv_format, (section,))

    def kv_token_bytes(self, kv_format: KVFormat) -> int:
        """Returns the bytes of one token's KV, including scales."""
        # blocks of this size fill whole cache lines, so there is no padding
        layout = self.kv_layout(kv_format, block_size=64)
        return layout.block_bytes // layout.block_size


MODELS = {
    model.name: model
    for model in (
        DenseModel(
            "qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936, tied=True, max_positions=40_960
        ),
        DenseModel("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, max_positions=40_960),
        DenseModel("qwen3-14b", 40, 5120, 40, 8, 128, 17_408, 151_936, max_positions=40_960),
        DenseModel("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936, max_positions=40_960),
        DenseModel("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, max_positions=131_072),
        DenseModel("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256, max_positions=131_072),
    )
}


def model_named(name: str) -> DenseModel:
    """Returns the model with this name, or the model in this directory. Raises ConfigError."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_dir():
        raise ConfigError(f"model {name!r} is neither a directory nor one of {', '.join(MODELS)}")
    return read_model(path)


def read_model(directory: Path) -> DenseModel:
    """Reads the sizes from a directory's config.json. Raises CheckpointError."""
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    text = config.get("text_config")  # a multimodal model has its text model's sizes here
    return _model_of(path, text if isinstance(text, dict) else config)


def _model_of(path: Path, config: Mapping[str, Any]) -> DenseModel:
    if any(config.get(key) for key in _EXPERT_KEYS):
        raise CheckpointError(f"{path}: models with experts are not planned for, only dense ones")
    if config.get(_MLA_KEY):
        raise CheckpointError(f"{path}: {_MLA_KEY}: KV of latent attention is not planned for")
    heads = _positive(path, config, "num_attention_heads")
    hidden = _positive(path, config, "hidden_size")
    return DenseModel(
        name=path.parent.resolve().name,
        layers=_positive(path, config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_positive(path, config, "num_key_value_heads", default=heads),
        head_dim=_positive(path, config, "head_dim", default=hidden // heads),
        ffn=_positive(path, config, "intermediate_size"),
        vocab=_positive(path, config, "vocab_size"),
        tied=config.get("tie_word_embeddings") is True,
        max_positions=config.get("max_position_embeddings"),
    )


def _positive(path: Path, config: Mapping[str, Any], key: str, *, default: int = 0) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {key} must be a positive integer, not {config.get(key)!r}")
    return value
