"""A step's inputs as one run of bytes, so that one copy sends them to a GPU. Needs only numpy.

    token_ids, positions, slot_mapping  [num_tokens] int64
    keep                                [num_kept] int64: tokens whose logits are wanted
    follows                             [num_tokens] int64: for a token that the step before chooses
                                        its place among those, otherwise KNOWN
    cu_seqlens_q                        [num_rows + 1] int32
    context_lens                        [num_rows] int32
    block_tables                        [num_rows, table_width] int32, padded with 0

`plan` computes the place of each array. The places depend only on these sizes, so a captured step
finds its inputs at the same addresses as during the capture. `arrays` returns views of the inputs
on the host, and `fill` writes them. `engine.model.attention.base` defines what they mean.

A captured step has a fixed number of rows, with a fixed number of tokens each: 1 for decode, more
for the verification of drafts. Rows with fewer tokens are padded at their front, because positions
count back from the end of the context. Rows that only pad the step have `context_len` 0. All tokens
of padding have slot PAD_SLOT: their KV is not stored, and their results are ignored.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from engine.messages import SeqId
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

KNOWN = -1  # in `follows`: the host knows the token, which is in `token_ids`
PAD_SLOT = -1  # in `slot_mapping`: the token's KV is not stored
ALIGNMENT_BYTES = 64  # places of arrays: kernels load 16 bytes, copies use cache lines
SMALL_SIZES = (1, 2, 4, 8)  # smallest row counts of captured steps; `padded_sizes` adds the others
ROW_LENS = (1, 2, 4, 8)  # tokens per row of captured steps
MAX_VERIFIED_TOKENS = 512  # most tokens of a captured step with several tokens per row

T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """One value for each input of a step. The value is a place, an array or a tensor."""

    token_ids: T
    positions: T
    slot_mapping: T
    keep: T
    follows: T
    cu_seqlens_q: T
    context_lens: T
    block_tables: T


class ArrayPlace(NamedTuple):
    """The place of an array in a run of bytes."""

    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end_bytes(self) -> int:
        """Returns the offset of the first byte after the array."""
        return self.offset_bytes + prod(self.shape) * np.dtype(self.dtype).itemsize


class Packing(NamedTuple):
    """The places of all inputs, and the number of bytes of the whole run."""

    places: Inputs[ArrayPlace]
    num_bytes: int


class PackingShape(NamedTuple):
    """The sizes that determine the places of a step's inputs."""

    num_rows: int
    num_tokens: int
    num_kept: int
    table_width: int  # blocks in each row of the block tables


class StepSize(NamedTuple):
    """The number of rows, and of tokens per row, to which a step is padded."""

    row_len: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of the step."""
        return self.row_len * self.num_rows

    def packed(self, table_width: int) -> PackingShape:
        """Returns the sizes of the step's inputs. Logits of all its tokens can be requested."""
        return PackingShape(self.num_rows, self.num_tokens, self.num_tokens, table_width)


def padded_sizes(maximum: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which decode steps are captured: 1, 2, 4, 8, 16, 24, 32, 48,
    64, …

    From 16 rows on, padding adds less than half of a step's rows. The number of captured steps
    grows with the logarithm of `maximum`.
    """
    sizes = list(SMALL_SIZES)
    while sizes[-1] < maximum:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(power // 2, SMALL_SIZES[-1]))
    return tuple(size for size in sizes if size <= maximum)


def captured_sizes(
    all_num_rows: Iterable[int], row_lens: Iterable[int] = ROW_LENS
) -> tuple[StepSize, ...]:
    """Returns the sizes of captured steps: of decode with these numbers of rows, and of
    verification.

    Sizes of verification are powers of two, up to MAX_VERIFIED_TOKENS, so that few captures are
    needed.
    """
    pairs = [StepSize(row_len, num_rows) for row_len in row_lens for num_rows in all_num_rows]
    return tuple(
        sorted(
            size
            for size in pairs
            if size.row_len == 1
            or (size.num_rows.bit_count() == 1 and size.num_tokens <= MAX_VERIFIED_TOKENS)
        )
    )


def padded_size(num_rows: int, longest: int, sizes: Iterable[StepSize]) -> StepSize | None:
    """Returns the smallest size that has room for these rows of up to `longest` tokens; None if no
    size has. Sizes with shorter rows are preferred, then sizes with fewer rows.
    """
    return min(
        (size for size in sizes if size.row_len >= longest and size.num_rows >= num_rows),
        default=None,
    )


@lru_cache(maxsize=256)
def plan(shape: PackingShape) -> Packing:
    """Computes the places of all inputs of a step that has these sizes."""
    num_rows, num_tokens, num_kept, table_width = shape
    arrays = Inputs(
        token_ids=("int64", (num_tokens,)),
        positions=("int64", (num_tokens,)),
        slot_mapping=("int64", (num_tokens,)),
        keep=("int64", (num_kept,)),
        follows=("int64", (num_tokens,)),
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
    """Returns the inputs as views of the bytes in `memory`."""
    return Inputs(
        *(
            memory[place.offset_bytes : place.end_bytes].view(place.dtype).reshape(place.shape)
            for place in packing.places
        )
    )


class Tables:
    """The block tables of the last step's rows, as arrays.

    A sequence's next step usually has the same blocks. Comparing two lists of blocks takes an
    eighth of the time of making an array. For a decode step with long contexts, making arrays is
    most of the host's work.
    """

    def __init__(self) -> None:
        self._known: dict[SeqId, tuple[Sequence[BlockId], np.ndarray]] = {}

    def of(self, rows: Sequence[Row], block_size: int) -> list[np.ndarray]:
        """Returns the blocks with each row's context, as int32."""
        self._known = {row.seq_id: self._of(row, -(-row.end // block_size)) for row in rows}
        return [self._known[row.seq_id][1] for row in rows]

    def _of(self, row: Row, num_blocks: int) -> tuple[Sequence[BlockId], np.ndarray]:
        blocks = row.block_table[:num_blocks]
        known = self._known.get(row.seq_id)
        if known is not None and known[0] == blocks:
            return known
        return blocks, np.array(blocks, dtype=np.int32)


def fill(  # noqa: PLR0913 - all but two have names at the call
    inputs: Inputs[np.ndarray],
    rows: Sequence[Row],
    keep: Sequence[int],
    *,
    tables: Tables,
    block_size: int,
    row_len: int | None = None,
    follows: Sequence[int | None] = (),
) -> None:
    """Writes every element of the inputs.

    `follows` has an entry for each row. It is the index of the row's last token among the tokens
    that the step before chooses, or None if the token is known. Without `follows` all tokens are
    known.

    With `row_len`, each row is padded to `row_len` tokens, and rows of padding are added up to the
    size of the inputs.
    """
    num_rows = len(rows)
    query_lens = _numbers((len(row.token_ids) for row in rows), num_rows)
    ends = _numbers((row.end for row in rows), num_rows)
    query_ends = query_lens.cumsum()
    num_tokens = int(query_lens.sum())
    row_of = np.repeat(np.arange(num_rows), query_lens)  # [num_tokens]
    index = np.arange(num_tokens)
    position = index + (ends - query_ends)[row_of]
    place = index  # index of each token in the padded step
    padded_ends = query_ends
    if row_len is not None:
        padded_ends = np.arange(1, len(inputs.context_lens) + 1) * row_len
        place = index + (padded_ends[:num_rows] - query_ends)[row_of]
        assert query_lens.max(initial=0) <= row_len
    assert len(padded_ends) == len(inputs.context_lens)
    assert len(inputs.token_ids) == (padded_ends[-1] if len(padded_ends) else 0)

    inputs.cu_seqlens_q[0] = 0
    inputs.cu_seqlens_q[1:] = padded_ends
    inputs.context_lens[:num_rows] = ends
    inputs.context_lens[num_rows:] = 0
    inputs.block_tables.fill(0)
    for blocks, table in zip(tables.of(rows, block_size), inputs.block_tables, strict=False):
        table[: len(blocks)] = blocks

    nth, offset = np.divmod(position, block_size)
    slots = inputs.block_tables[row_of, nth].astype(np.int64) * block_size + offset
    token_ids = _numbers(chain.from_iterable(row.token_ids for row in rows), num_tokens)
    for array, values, pad in (
        (inputs.token_ids, token_ids, 0),
        (inputs.positions, position, 0),
        (inputs.slot_mapping, slots, PAD_SLOT),
    ):
        if len(array) > num_tokens:
            array.fill(pad)
        array[place] = values
    inputs.keep[: len(keep)] = place[_numbers(keep, len(keep))]
    inputs.keep[len(keep) :] = 0
    inputs.follows.fill(KNOWN)
    for row, chosen in enumerate(follows):
        if chosen is not None:
            inputs.follows[place[query_ends[row] - 1]] = chosen


def _numbers(values: object, count: int) -> np.ndarray:
    return np.fromiter(values, np.int64, count)
