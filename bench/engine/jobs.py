"""The jobs that engines are timed on, the models of `bench.gpu`, and tables of KV blocks. Pure.

`bench.gpu` imports this file on machines with few packages: it needs neither typer nor rich.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.common.prompts import PromptShape, token_prompts
from bench.common.shapes import Shape
from engine.layout import KVSection
from engine.worker.blocks import BlockId

MIB = 2**20


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Sequences with contexts of one length. An engine computes them (prefill) or decodes them for
    some steps.
    """

    name: str
    num_sequences: int
    context_len: int
    num_steps: int  # decode steps; 0: the prefill is measured
    for_peers: bool
    # False: one context is computed and its KV is copied to all sequences
    prefills_all: bool = True

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that are divided by the job's time to give its speed."""
        return self.num_sequences * (self.num_steps or self.context_len)

    @property
    def kv_tokens(self) -> int:
        """Returns the number of tokens with KV at the end of the job."""
        return self.num_sequences * (self.context_len + self.num_steps + 1)


def prompts_of(job: EngineJob, vocab_size: int, *, seed: int, repeat: int) -> list[list[int]]:
    """Returns the job's prompts. They are the same for every engine and differ between
    repetitions.
    """
    rng = Random(f"{seed}/{job.name}/{repeat}")
    num_prompts = job.num_sequences if job.prefills_all else 1
    shape = PromptShape(num_prompts=num_prompts, input_len=job.context_len)
    return [[*prompt] for prompt in token_prompts(range(vocab_size), shape, rng)]


def limits_of(jobs: Sequence[EngineJob]) -> dict[str, int]:
    """Returns the largest sizes that these jobs need, by the names of the drivers' options."""
    return {
        "--max-sequences": max(job.num_sequences for job in jobs),
        "--max-len": max(job.context_len + job.num_steps + 1 for job in jobs),
        "--max-tokens": max(job.kv_tokens for job in jobs),
    }


@dataclass(frozen=True, slots=True)
class GpuShape:
    """A Llama with random weights, its jobs, and the input sizes for measuring the ceilings."""

    model: Shape
    prefill_len: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    attention_jobs: tuple[tuple[int, int], ...]  # rows and context tokens of each job
    num_steps: int  # steps of a decode job
    read_bytes: int  # bytes that are read to measure bandwidth
    matrix_size: int  # rows of the square matrices that measure arithmetic

    def section(self, num_layers: int | None = None) -> KVSection:
        """Returns the layout of the KV of all layers, or of the first `num_layers` layers."""
        model = self.model
        return KVSection(num_layers or model.num_layers, model.num_kv_heads, model.head_dim)


GPU_SHAPES = {
    "8b": GpuShape(
        model=Shape(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_size=14336,
            vocab_size=128256,
            max_positions=32_896,  # context of the longest job, including its steps
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
    """Returns the block tables of sequences of these lengths. They use as few blocks as possible,
    in random order.
    """
    counts = [-(-length // block_size) for length in lens]
    blocks = [BlockId(i) for i in range(sum(counts))]
    Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(count)] for count in counts]
