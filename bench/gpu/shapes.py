"""Shapes of models for `bench.gpu`, their jobs, and blocks for their KV. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.common.roofline import ModelSize
from engine.layout import KVSection
from engine.worker.blocks import BlockId

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuShape:
    """A Llama with random weights, and the sizes of its jobs and of the ceilings' inputs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    prefill_len: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    attention_jobs: tuple[tuple[int, int], ...]  # rows, context
    num_steps: int  # of a decode job
    read_bytes: int  # to measure bandwidth with
    matrix_size: int  # to measure arithmetic with

    @property
    def context_len(self) -> int:
        """The longest context of any job."""
        longest = max(*self.contexts, *(context for _, context in self.attention_jobs))
        return max(self.prefill_len, longest + 4 * self.num_steps)

    @property
    def size(self) -> ModelSize:
        """The sizes on which the model's speed depends."""
        attention_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * attention_size + 2 * kv_size + 3 * self.ffn_size)
        return ModelSize(
            num_layers=self.num_layers,
            attention_size=attention_size,
            layer_weights=self.num_layers * layer,
            head_weights=self.vocab_size * self.hidden_size,
        )

    def section(self, num_layers: int | None = None) -> KVSection:
        """The layout of its KV, or of that of its first `num_layers` layers."""
        return KVSection(num_layers or self.num_layers, self.num_kv_heads, self.head_dim)


SHAPES = {
    "8b": GpuShape(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=128256,
        prefill_len=8192,
        batches=(1, 8, 64),
        contexts=(1024, 4096, 32768),
        attention_jobs=((64, 4096), (8, 32768), (1, 32768)),
        num_steps=32,
        read_bytes=2048 * MIB,
        matrix_size=8192,
    ),
    "tiny": GpuShape(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=96,
        vocab_size=256,
        prefill_len=64,
        batches=(1, 3),
        contexts=(8, 40),
        attention_jobs=((3, 40),),
        num_steps=2,
        read_bytes=4 * MIB,
        matrix_size=128,
    ),
}


def scattered_tables(lens: Sequence[int], block_size: int, *, seed: int) -> list[list[BlockId]]:
    """Block tables of sequences of these lengths, in random order over as few blocks as needed."""
    counts = [-(-length // block_size) for length in lens]
    blocks = [BlockId(i) for i in range(sum(counts))]
    Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(count)] for count in counts]
