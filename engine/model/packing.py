"""A step's inputs as one run of bytes, so that one copy brings them to a GPU. Only numpy.

    token_ids, positions, slot_mapping  [num_tokens] int64
    keep                                [num_kept] int64: tokens whose logits are wanted
    cu_seqlens_q                        [num_rows + 1] int32
    context_lens                        [num_rows] int32
    block_tables                        [num_rows, table_width] int32, padded with 0

`plan` computes where each of them lies. That depends only on these sizes, so a captured step finds
its inputs where they lay when it was captured. `arrays` are the inputs on the host, and `fill`
writes them. They have the meaning that `engine.model.attention.base` gives a batch.

A captured step may have more rows than there are sequences. The rows that fill it up have
`context_len` 0 and slots PAD_SLOT: nothing is stored for them, and their results are ignored.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from engine.messages import SeqId
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

PAD_SLOT = -1  # in a slot mapping: a token that is not stored
ALIGNMENT_BYTES = 64  # of each array: kernels load 16 bytes at once, copies a cache line
SMALL_SIZES = (1, 2, 4, 8)  # rows of captured steps; then powers of two and midpoints

T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """One value for each of a step's inputs: its place, its array or its tensor."""

    token_ids: T
    positions: T
    slot_mapping: T
    keep: T
    cu_seqlens_q: T
    context_lens: T
    block_tables: T


class ArrayPlace(NamedTuple):
    """The place of an array in the run of bytes."""

    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end_bytes(self) -> int:
        """The offset behind its last byte."""
        return self.offset_bytes + prod(self.shape) * np.dtype(self.dtype).itemsize


class Packing(NamedTuple):
    """The places of all inputs, and the size of the whole run."""

    places: Inputs[ArrayPlace]
    num_bytes: int


class PackingShape(NamedTuple):
    """The sizes on which a packing depends."""

    num_rows: int
    num_tokens: int
    num_kept: int
    table_width: int  # blocks


def padded_sizes(maximum: int) -> tuple[int, ...]:
    """Numbers of rows for which decode steps are captured: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, …

    From 16 rows on a step computes less than half as many rows again as it has. The cost of
    captured steps grows with the logarithm of `maximum`.
    """
    sizes = list(SMALL_SIZES)
    while sizes[-1] < maximum:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(power // 2, SMALL_SIZES[-1]))
    return tuple(size for size in sizes if size <= maximum)


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` that holds the rows; None if none does."""
    return min((size for size in sizes if size >= num_rows), default=None)


@lru_cache(maxsize=256)
def plan(shape: PackingShape) -> Packing:
    """Computes where the inputs of a step of these sizes lie."""
    num_rows, num_tokens, num_kept, table_width = shape
    arrays = Inputs(
        token_ids=("int64", (num_tokens,)),
        positions=("int64", (num_tokens,)),
        slot_mapping=("int64", (num_tokens,)),
        keep=("int64", (num_kept,)),
        cu_seqlens_q=("int32", (num_rows + 1,)),
        context_lens=("int32", (num_rows,)),
        block_tables=("int32", (num_rows, table_width)),
    )
    places = []
    end = 0
    for dtype, size in arrays:
        places.append(ArrayPlace(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, dtype, size))
        end = places[-1].end_bytes
    return Packing(Inputs(*places), end)


def arrays(memory: np.ndarray, packing: Packing) -> Inputs[np.ndarray]:
    """Views of the inputs in `memory`, which holds bytes."""
    return Inputs(
        *(
            memory[place.offset_bytes : place.end_bytes].view(place.dtype).reshape(place.shape)
            for place in packing.places
        )
    )


class Tables:
    """The block tables of the last step's rows, as arrays.

    A sequence's next step mostly has the same blocks. Comparing them takes an eighth of the time of
    making an array, which is most of the host's work for a decode step with long contexts.
    """

    def __init__(self) -> None:
        self._known: dict[SeqId, tuple[Sequence[BlockId], np.ndarray]] = {}

    def of(self, rows: Sequence[Row], block_size: int) -> list[np.ndarray]:
        """The blocks that hold each row's context, int32."""
        self._known = {row.seq_id: self._of(row, -(-row.end // block_size)) for row in rows}
        return [self._known[row.seq_id][1] for row in rows]

    def _of(self, row: Row, num_blocks: int) -> tuple[Sequence[BlockId], np.ndarray]:
        blocks = row.block_table[:num_blocks]
        known = self._known.get(row.seq_id)
        if known is not None and known[0] == blocks:
            return known
        return blocks, np.array(blocks, dtype=np.int32)


def fill(
    inputs: Inputs[np.ndarray],
    rows: Sequence[Row],
    keep: Sequence[int],
    *,
    tables: Tables,
    block_size: int,
    pad_len: int = 1,
) -> None:
    """Writes every element: `rows`, then as many rows of `pad_len` tokens as there is room for."""
    num_rows = len(rows)
    query_lens = _numbers((len(row.token_ids) for row in rows), num_rows)
    ends = _numbers((row.end for row in rows), num_rows)
    num_tokens = int(query_lens.sum())
    num_pads = len(inputs.context_lens) - num_rows
    assert len(inputs.token_ids) == num_tokens + num_pads * pad_len

    lengths = np.concatenate(([0], query_lens, np.full(num_pads, pad_len)))
    np.cumsum(lengths, out=inputs.cu_seqlens_q, dtype=np.int32)
    inputs.context_lens[:num_rows] = ends
    inputs.context_lens[num_rows:] = 0
    inputs.block_tables.fill(0)
    for blocks, table in zip(tables.of(rows, block_size), inputs.block_tables, strict=False):
        table[: len(blocks)] = blocks

    row_of = np.repeat(np.arange(num_rows), query_lens)  # [num_tokens]
    before = ends - query_lens.cumsum()  # from a token's index in the batch to its position
    position = np.arange(num_tokens) + before[row_of]
    nth, offset = np.divmod(position, block_size)
    slots = inputs.block_tables[row_of, nth].astype(np.int64) * block_size + offset
    token_ids = _numbers(chain.from_iterable(row.token_ids for row in rows), num_tokens)
    for array, values, pad in (
        (inputs.token_ids, token_ids, 0),
        (inputs.positions, position, 0),
        (inputs.slot_mapping, slots, PAD_SLOT),
        (inputs.keep, keep, 0),
    ):
        array[: len(values)] = values
        array[len(values) :] = pad


def _numbers(values: object, count: int) -> np.ndarray:
    return np.fromiter(values, np.int64, count)
