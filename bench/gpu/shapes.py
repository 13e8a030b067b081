"""Shapes of models for `bench.gpu`, their jobs, and blocks for their KV. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.common.shapes import Shape
from engine.layout import KVSection
from engine.worker.blocks import BlockId

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuShape:
    """A Llama with random weights, and the sizes of its jobs and of the ceilings' inputs."""

    model: Shape
    prefill_len: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    attention_jobs: tuple[tuple[int, int], ...]  # rows, context
    num_steps: int  # in a decode job
    read_bytes: int  # to measure bandwidth with
    matrix_size: int  # to measure arithmetic with

    def section(self, num_layers: int | None = None) -> KVSection:
        """Returns the layout of the KV of all layers, or of the first `num_layers` layers."""
        model = self.model
        return KVSection(num_layers or model.num_layers, model.num_kv_heads, model.head_dim)


SHAPES = {
    "8b": GpuShape(
        model=Shape(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_size=14336,
            vocab_size=128256,
            max_positions=32_896,  # context of the longest job, steps included
        ),
        prefill_len=8192,
        batches=(1, 8, 64),
        contexts=(1024, 4096, 32768),
        attention_jobs=((64, 4096), (8, 32768), (1, 32768)),
        num_steps=32,
        read_bytes=2048 * MIB,
        matrix_size=8192,
    ),
    "1b": GpuShape(
        model=Shape(
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            ffn_size=8192,
            vocab_size=128256,
            max_positions=32_896,
        ),
        prefill_len=8192,
        batches=(1, 8, 64),
        contexts=(1024, 4096, 32768),
        attention_jobs=((64, 4096), (8, 32768), (1, 32768)),
        num_steps=32,
        read_bytes=1024 * MIB,
        matrix_size=8192,
    ),
    "tiny": GpuShape(
        model=Shape(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            ffn_size=96,
            vocab_size=256,
            max_positions=1024,
        ),
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
    """Returns block tables of sequences of these lengths; they use as few blocks as possible, in
    random order.
    """
    counts = [-(-length // block_size) for length in lens]
    blocks = [BlockId(i) for i in range(sum(counts))]
    Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(count)] for count in counts]
