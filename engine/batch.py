"""What a step computes, as integers: the seam between schedulers and the runner.

One shape serves everything: each row extends one sequence's context by `q` tokens, whether those
are a prefill chunk (`q` = chunk), a decode step (`q` = 1) or, later, the verification of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.blocks import BlockId
from engine.layout import KVLayout
from engine.messages import Sampling, SeqId


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `token_ids` at positions `start`, `start + 1`, …; K and V go into the block table.

    With `sampling`, also choose the token that follows; `banned` ids are never chosen.
    """

    seq_id: SeqId
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    sampling: Sampling | None
    banned: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Context length after this row, and the position of the token it samples."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Rows of one forward pass, of different sequences."""

    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The sampled token of each row, None where the row samples none."""

    tokens: Sequence[int | None]


class Runner(Protocol):
    """Carries out batch plans on a KV buffer of `num_blocks` blocks."""

    layout: KVLayout
    num_blocks: int

    def run(self, plan: BatchPlan) -> BatchResult:
        """Runs one forward pass; afterwards K and V of all its tokens are in the buffer."""
        ...
