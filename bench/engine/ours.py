"""Baton's engine, driven like its peers (see `bench.peers.driver`), with a few more commands.

    python -m bench.engine.ours WEIGHTS KV_FORMAT --checkpoint DIR …   (and the drivers' options)

The engine runs the steps of an otherwise idle worker with default settings: prompts in chunks
within a step's token budget, then one token of every sequence per step. A worker's scheduling and
messages are left out.

`decode_at` decodes behind contexts of any length. It computes one prompt and copies its blocks for
the other sequences, so that each sequence reads memory of its own.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.peers.driver import Prompts, Stopwatch, drive, stdout_for_answers
from engine.clock import Clock, MonotonicClock
from engine.config import DeviceKind, WeightFormat, WorkerConfig
from engine.devices.settings import resolve
from engine.layout import KVFormat
from engine.messages import Sampling, SeqId
from engine.worker.batch import BatchPlan, Row
from engine.worker.blocks import BlockId

GREEDY = Sampling(temperature=0.0)
DEFAULTS = resolve(WorkerConfig(), DeviceKind.CPU)


def prefill_steps(
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[BlockId]],
    *,
    chunk_tokens: int = DEFAULTS.chunk_tokens,
    budget_tokens: int = DEFAULTS.max_batch_tokens,
) -> Iterator[list[Row]]:
    """Returns the steps that compute all prompts, as `prefill.scheduler` plans them.

    Prompts are computed in order of arrival. A step has at most one chunk of each prompt. The last
    chunk of a prompt samples the answer's first token.
    """
    starts = [0] * len(prompts)
    while any(start < len(prompt) for start, prompt in zip(starts, prompts, strict=True)):
        rows = []
        budget = budget_tokens
        for i, prompt in enumerate(prompts):
            num = min(budget, chunk_tokens, len(prompt) - starts[i])
            if num > 0:
                end = starts[i] + num
                sampling = GREEDY if end == len(prompt) else None
                rows.append(_row(i, prompt[starts[i] : end], starts[i], tables[i], sampling))
                starts[i] = end
                budget -= num
        yield rows


def tables_of(lens: Sequence[int], block_size: int) -> list[list[BlockId]]:
    """Returns the block tables of sequences of these lengths. Blocks are numbered from 0."""
    tables = []
    first = 0
    for length in lens:
        end = first + -(-length // block_size)
        tables.append([BlockId(i) for i in range(first, end)])
        first = end
    return tables


class OurEngine:
    """One runner with its weights and KV. Each public method is a command of the protocol."""

    def __init__(self, options: argparse.Namespace, weights: str, kv_format: str) -> None:
        import torch

        from engine.model.runner import TorchRunner

        torch.set_num_threads(options.threads)
        self._clock: Clock = MonotonicClock()
        begin_s = self._clock.now_s()
        # each sequence may have one block that is only partly filled
        num_blocks = -(-options.max_tokens // DEFAULTS.block_size) + options.max_sequences
        self._runner = TorchRunner(
            Path(options.checkpoint),
            block_size=DEFAULTS.block_size,
            kv_format=KVFormat(kv_format),
            num_blocks=num_blocks,
            weights=WeightFormat(weights),
        )
        self._runner.open()
        loaded_s = self._clock.now_s()
        warm_up_s = self._runner.warm_up()
        layout = self._runner.layout
        self.facts: dict[str, object] = {
            "version": torch.__version__,
            "weights_bytes": self._runner.weights_bytes,
            "kv_token_bytes": layout.block_bytes / layout.block_size,
            "load_s": loaded_s - begin_s,
            "warm_up_s": warm_up_s,
        }

    def generate(self, prompts: Prompts, num_steps: int) -> dict[str, object]:
        """Computes all prompts, then decodes `num_steps` tokens of each answer after its first
        token.
        """
        tables = self._tables([len(prompt) + num_steps for prompt in prompts])
        watch = Stopwatch()
        answers = [[token] for token in self._prefill(prompts, tables)]
        watch.stamp_first()
        lens = [len(prompt) for prompt in prompts]
        outside_s = self._decode(answers, lens, tables, num_steps)
        if num_steps:
            watch.stamp_last()
        return {**watch.answer(answers), "outside_forward_s": outside_s}

    def decode_at(self, prompt: list[int], num_sequences: int, num_steps: int) -> dict[str, object]:
        """Decodes `num_sequences` sequences. Each has its own copy of this prompt's KV."""
        context_len = len(prompt)
        tables = self._tables([context_len + num_steps] * num_sequences)
        [first] = self._prefill([prompt], tables[:1])
        self._copy_blocks(tables, self._runner.layout.num_blocks_for(context_len))
        answers = [[first] for _ in tables]
        watch = Stopwatch()
        watch.stamp_first()
        outside_s = self._decode(answers, [context_len] * num_sequences, tables, num_steps)
        watch.stamp_last()
        return {**watch.answer(answers), "outside_forward_s": outside_s}

    def memory(self) -> dict[str, object]:
        """Returns the memory of this process, in bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"resident_bytes": pages * 4096}

    def _tables(self, lens: Sequence[int]) -> list[list[BlockId]]:
        tables = tables_of(lens, self._runner.layout.block_size)
        assert tables[-1][-1] < self._runner.num_blocks
        return tables

    def _prefill(self, prompts: Prompts, tables: Sequence[Sequence[BlockId]]) -> list[int]:
        first: dict[SeqId, int] = {}
        for rows in prefill_steps(prompts, tables):
            tokens = self._runner.run(BatchPlan(rows)).tokens
            first |= {
                row.seq_id: token
                for row, token in zip(rows, tokens, strict=True)
                if token is not None
            }
        return [first[_seq_id(i)] for i in range(len(prompts))]

    def _decode(
        self,
        answers: list[list[int]],
        lens: Sequence[int],
        tables: Sequence[Sequence[BlockId]],
        num_steps: int,
    ) -> float:
        """Appends `num_steps` tokens to each answer. Returns the seconds that were spent outside
        the forward pass.
        """
        outside_s = 0.0
        for step in range(num_steps):
            begin_s = self._clock.now_s()
            rows = [
                _row(i, answer[-1:], lens[i] + step, tables[i], GREEDY)
                for i, answer in enumerate(answers)
            ]
            result = self._runner.run(BatchPlan(rows))
            for answer, token in zip(answers, result.tokens, strict=True):
                assert token is not None
                answer.append(token)
            assert result.times is not None
            outside_s += self._clock.now_s() - begin_s - result.times.forward_s
        return outside_s

    def _copy_blocks(self, tables: Sequence[Sequence[BlockId]], num_blocks: int) -> None:
        """Copies the KV blocks of the first sequence's prompt to every other sequence."""
        blocks = np.frombuffer(self._runner.buffer, np.uint8)
        blocks = blocks.reshape(-1, self._runner.layout.block_bytes)
        for table in tables[1:]:
            blocks[table[:num_blocks]] = blocks[tables[0][:num_blocks]]


def _row(
    seq: int,
    token_ids: Sequence[int],
    start: int,
    table: Sequence[BlockId],
    sampling: Sampling | None,
) -> Row:
    return Row(_seq_id(seq), token_ids, start, table, sampling)


def _seq_id(index: int) -> SeqId:
    return SeqId(str(index))


def main() -> None:
    """Runs the engine that the command-line arguments describe."""
    from bench.peers.driver import options_of

    out = stdout_for_answers()
    weights, kv_format = sys.argv[1:3]
    options = options_of(["ours", *sys.argv[3:]])
    drive(lambda: OurEngine(options, weights, kv_format), sys.stdin, out)


if __name__ == "__main__":
    main()
