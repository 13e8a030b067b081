"""The roofline of a dense decoder: flops and bytes of its steps, and the least time they take.

With L layers, h query heads of d_h, M weights in the layers' matrices, H in the output matrix, b
sequences and KV of kv bytes a token:

    prefill of n tokens    2·M·n + 2·H flops in matrices, 4·L·h·d_h·n(n+1)/2 in attention
    a decode step          2·(M + H)·b,                   4·L·h·d_h·(sum of the contexts)
    bytes of a step        (bytes of the matrices in memory) + kv·(sum of the contexts)

The least time is the greater of flops over peak and bytes over read bandwidth. If weights are int8,
matrices run at the peak of int8. Otherwise matrices run at fp32's peak or at a third of bf16's
peak, whichever is higher. The third is because weights are bf16 in the checkpoint, and activations
are sums of three bf16 numbers. If KV is int8, attention runs at half of the int8 peak, because
queries have 16 bits; otherwise it runs at fp32's peak. Norms, activations, the embedding and writes
are left out, so an engine can approach the limit but not reach it.

Source: the roofline, Williams, Waterman & Patterson, CACM 52(4), 2009.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.model.loading.files import read_header, read_json, weight_files

BF16_PARTS = 3
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a dense decoder that determine its speed."""

    num_layers: int
    attention_size: int  # query heads times head_dim
    layer_weights: int  # M of the formulas: weights in the layers' matrices
    head_weights: int  # H of the formulas: weights in the output matrix


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of weights and KV that a step reads, in the engine's formats."""

    weights_bytes: float  # bytes of all matrices except the embedding
    kv_token_bytes: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured peaks of this machine, with as many threads as the engines use."""

    read_bytes_per_s: float
    fp32_flops_per_s: float
    int8_flops_per_s: float  # a multiplication and an addition count as two operations
    bf16_flops_per_s: float = 0.0  # bf16 products with fp32 sums

    def or_higher(self, other: "Ceilings") -> "Ceilings":
        """Returns the higher of the two values for each peak."""
        return Ceilings(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Work:
    """The least flops and bytes that some steps need."""

    matrix_flops: float
    attention_flops: float
    read_bytes: float

    @property
    def flops(self) -> float:
        """Returns all flops, in matrices and in attention."""
        return self.matrix_flops + self.attention_flops

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matrix_flops + other.matrix_flops,
            self.attention_flops + other.attention_flops,
            self.read_bytes + other.read_bytes,
        )


def model_size(checkpoint: Path) -> ModelSize | None:
    """Returns the model's sizes, from its files. None for models with experts, since a step uses
    only some experts.

    Raises CheckpointError.
    """
    config = read_json(checkpoint, "config.json")
    if not isinstance(config, dict) or "num_hidden_layers" not in config:
        raise CheckpointError(f"{checkpoint / 'config.json'}: num_hidden_layers is missing")
    if any(config.get(key) for key in EXPERT_KEYS):
        return None
    matrices = {
        name: math.prod(tensor["shape"])
        for file in weight_files(checkpoint)
        for name, tensor in read_header(file).items()
        if len(tensor["shape"]) == 2
    }
    embedding = sum(size for name, size in matrices.items() if "embed" in name)
    head = sum(size for name, size in matrices.items() if name.startswith("lm_head"))
    heads = config["num_attention_heads"]
    return ModelSize(
        num_layers=config["num_hidden_layers"],
        attention_size=heads * (config.get("head_dim") or config["hidden_size"] // heads),
        layer_weights=sum(matrices.values()) - embedding - head,
        head_weights=head or embedding,  # tied weights: the embedding is also the output matrix
    )


def prefill_work(model: ModelSize, memory: ModelMemory, lens: Sequence[int]) -> Work:
    """Returns the work of one step that computes prompts of these lengths. The step reads the
    weights once.
    """
    tokens = sum(lens)
    pairs = sum(n * (n + 1) / 2 for n in lens)
    return Work(
        matrix_flops=2 * (model.layer_weights * tokens + model.head_weights * len(lens)),
        attention_flops=4 * model.num_layers * model.attention_size * pairs,
        read_bytes=memory.weights_bytes + memory.kv_token_bytes * tokens,
    )


def decode_work(model: ModelSize, memory: ModelMemory, contexts: Sequence[int]) -> Work:
    """Returns the work of one decode step. `contexts` are the sequences' lengths, including the new
    token.
    """
    total = sum(contexts)
    return Work(
        matrix_flops=2 * (model.layer_weights + model.head_weights) * len(contexts),
        attention_flops=4 * model.num_layers * model.attention_size * total,
        read_bytes=memory.weights_bytes + memory.kv_token_bytes * total,
    )


def least_time_s(work: Work, ceilings: Ceilings, weights: str, kv: str = "fp32") -> float:
    """Returns the least seconds that this machine needs for the work. `weights` and `kv` are number
    formats.
    """
    fp32, int8 = ceilings.fp32_flops_per_s, ceilings.int8_flops_per_s
    matrices = int8 if weights == "int8" else max(fp32, ceilings.bf16_flops_per_s / BF16_PARTS)
    matrices_s = work.matrix_flops / matrices
    attention_s = work.attention_flops / (max(fp32, int8 / 2) if kv == "int8" else fp32)
    return max(matrices_s + attention_s, work.read_bytes / ceilings.read_bytes_per_s)
