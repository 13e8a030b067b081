"""Measures at load if a sequence gets the same bits alone, in any batch and in any chunking.

The kernels, and the functions that `native.invariant` replaces, keep that promise by construction.
A model's own code may use other functions of torch; only a trial shows how these behave.

The trial is one short sequence, computed several times: whole and alone, in chunks, and behind and
before other rows. There are enough other rows that the sequence's elements move between vector
loops and remainders, and its rows move within a matrix product.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from engine.messages import SeqId
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

TOKENS = (5, 3, 8, 2, 9, 4, 7, 6, 1, 8, 3)
OTHERS = tuple(TOKENS[:n] for n in (1, 4, 7, 10, 3, 6, 9, 2))  # other rows
# For each trial: chunks of the sequence, the number of other rows before each chunk, and the number
# of all other rows.
TRIALS = (((1, 4, 6), 0, 0), ((11,), 5, len(OTHERS)), ((6, 5), 2, 3))

# (rows, indices of tokens to keep) → logits [len(keep), vocab]
Compute = Callable[[Sequence[Row], Sequence[int]], torch.Tensor]


def num_blocks(block_size: int) -> int:
    """Returns the number of KV blocks that the trial needs."""
    return sum(-(-len(tokens) // block_size) for tokens in (TOKENS, *OTHERS))


def keeps_bits(compute: Compute, block_size: int) -> bool:
    """Returns True if all trials give the same bits as the sequence alone."""
    mine, *theirs = _tables(block_size)
    others = [
        Row(SeqId(f"other-{i}"), tokens, 0, table, None)
        for i, (tokens, table) in enumerate(zip(OTHERS, theirs, strict=True))
    ]
    alone = _logits(compute, mine, (len(TOKENS),), [], [])
    found = [  # run every trial: the ranks of a worker compute them together
        _logits(compute, mine, chunks, others[:first], others[first:end])
        for chunks, first, end in TRIALS
    ]
    return all(torch.equal(alone, logits) for logits in found)


def _logits(
    compute: Compute,
    table: list[BlockId],
    chunks: Sequence[int],
    before: list[Row],
    after: list[Row],
) -> torch.Tensor:
    """Returns the logits of all tokens of the sequence."""
    first = sum(len(row.token_ids) for row in before)
    found = []
    for start, end in pairwise(accumulate(chunks, initial=0)):
        row = Row(SeqId("tried"), TOKENS[start:end], start, table, None)
        found.append(compute([*before, row, *after], range(first, first + end - start)))
    return torch.cat(found)


def _tables(block_size: int) -> list[list[BlockId]]:
    """Returns the block tables: the sequence's first, then those of the other rows."""
    sizes = (-(-len(tokens) // block_size) for tokens in (TOKENS, *OTHERS))
    return [
        [BlockId(i) for i in range(first, end)]
        for first, end in pairwise(accumulate(sizes, initial=0))
    ]
