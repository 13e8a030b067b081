"""The plan of a step and its result, in integers: the interface between schedulers and the runner.

A runner launches a step, and may still be computing when `launch` returns. Before `result` has
returned, the step's blocks may not be leased or given to new owners, and its duration is unknown.

All steps have the same form. Each row extends one sequence's context by `q` tokens. For a prefill
chunk `q` is the length of the chunk. For a decode step `q` is 1. For the verification of a draft of
k tokens `q` is k + 1: the row's own token and the drafted tokens after it.

A drafted token is kept if the target chooses the same token at this position, with the noise of
this position. The token after the last kept token is also the target's choice. So a row that drafts
k tokens yields between 1 and k + 1 tokens. They are the same tokens as in k + 1 steps without a
draft.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.grammar.guide import Guide
from engine.layout import KVLayout
from engine.messages import Logprobs, Sampling, SeqId
from engine.worker.blocks import BlockId


class Row(msgspec.Struct, frozen=True):  # created five times as fast as a dataclass
    """Compute `token_ids` at positions `start`, `start + 1`, …; K and V are stored in the block
    table.

    With `sampling`, also choose the token that follows; `banned` ids are never chosen. The block
    table has room for the drafted tokens too. Only some rows use the other fields:

        `draft`            tokens proposed to follow; or
        `num_to_draft`     number of tokens that the draft model shall propose
        `draft_token_ids`  tokens that end with `token_ids`, whose K and V the draft model computes;
                           skips a row without any, and proposes nothing for it
        `history`          all tokens up to the last of `token_ids`, if penalties need them;
                           the answer begins at `prompt_len`
        `guide`            the state of the grammar after `token_ids`
        `scored`           tokens known to follow each of `token_ids`, from the first on: the result
                           has their log-probabilities, and `num_top` of the likeliest beside each
        `is_pending`       its only token is the one that the step before chooses for the sequence;
                           `token_ids` has a placeholder. `history` and `guide` know the token
                           once the result of that step was handed out
        `tpot_s`           the longest time of a step that its client wants, in seconds
    """

    seq_id: SeqId
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    sampling: Sampling | None
    banned: tuple[int, ...] = ()
    draft: Sequence[int] = ()
    num_to_draft: int = 0
    draft_token_ids: Sequence[int] = ()
    history: "array[int] | None" = None
    prompt_len: int = 0
    guide: Guide | None = None
    scored: Sequence[int] = ()
    num_top: int = 0
    is_pending: bool = False
    tpot_s: float | None = None

    @property
    def end(self) -> int:
        """Returns the context length after this row, without drafts. This is also the position of
        the token that the row chooses.
        """
        return self.start + len(self.token_ids)

    @property
    def max_drafted(self) -> int:
        """Returns the largest number of drafted tokens that this row verifies."""
        return len(self.draft) + self.num_to_draft


class BatchPlan(msgspec.Struct, frozen=True):
    """The rows of one forward pass. Each row belongs to another sequence."""

    rows: Sequence[Row]


class RowResult(msgspec.Struct, frozen=True):
    """The result of a row. It has no tokens if the row chooses none.

    `token_ids` are the drafted tokens that were kept, and the token that the target chose after
    them. K and V of all these tokens except the last are now in the block table.
    """

    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0  # number of drafted tokens that were verified
    logprobs: tuple[Logprobs, ...] = ()  # log-probability of each token, if requested
    scored: tuple[Logprobs, ...] = ()  # log-probability of each token in the row's `scored`
    embedding: bytes = b""  # fp32 [hidden] of the last token, if the model computes embeddings

    @property
    def num_accepted(self) -> int:
        """Returns the number of drafted tokens that the target kept."""
        return max(len(self.token_ids) - 1, 0)


class StepTimes(msgspec.Struct, frozen=True):
    """The parts of a step's duration on the host, in seconds.

    A GPU computes while the host continues. There `forward_s` ends when the passes are queued, and
    `sample_s` includes the wait for the passes. If the step was launched before the last step had
    ended, its duration begins at the end of the last step.
    """

    prepare_s: float
    forward_s: float
    sample_s: float
    draft_s: float = 0.0  # duration of the draft model's passes, which come first

    @property
    def total_s(self) -> float:
        """Returns the duration of the whole step in seconds."""
        return self.draft_s + self.prepare_s + self.forward_s + self.sample_s


class BatchResult(msgspec.Struct, frozen=True):
    """The result of each row. Includes the step's durations if the runner measures them."""

    rows: Sequence[RowResult]
    times: StepTimes | None = None

    @property
    def tokens(self) -> list[int | None]:
        """Returns the first token that each row chose; None for rows that chose no token."""
        return [row.token_ids[0] if row.token_ids else None for row in self.rows]


class LaunchedStep(Protocol):
    """A step that a runner has launched."""

    def result(self) -> BatchResult:
        """Waits for the end of the step. After that, K and V of all its tokens are in the buffer,
        and the step accesses no memory any more.
        """
        ...


class Runner(Protocol):
    """Carries out batch plans on a KV buffer of `num_blocks` blocks, in the order of their launch.

    If `overlaps` is true, the next step may be launched before `result` of the last step was
    called, and may have pending rows. Otherwise `result` must be called before the next launch.
    """

    layout: KVLayout
    num_blocks: int
    overlaps: bool

    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Starts the forward pass of a plan."""
        ...
