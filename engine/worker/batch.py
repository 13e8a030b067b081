"""The plan of a step and its result, in integers: the interface between schedulers and the runner.

A runner launches a step and may still compute when `launch` returns. Before `result` has returned,
the step's blocks may not be leased or given to new owners, and its duration is unknown.

One shape serves all steps. Each row extends one sequence's context by `q` tokens. A prefill chunk
has `q` = chunk, a decode step `q` = 1. The verification of a draft of k tokens has `q` = k + 1: the
row's own token and the drafted ones behind it.

A drafted token is kept if the target chooses it there, with the noise of that position. The token
after the last kept one is the target's choice too. So a row that drafts k tokens yields between 1
and k + 1 tokens. They equal the tokens of k + 1 steps without a draft.
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
    """Compute `token_ids` at positions `start`, `start + 1`, …; K and V go into the block table.

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
        """Returns the context length after this row, drafts excluded: the position of the token
        that the row chooses.
        """
        return self.start + len(self.token_ids)

    @property
    def max_drafted(self) -> int:
        """Returns the most drafted tokens that this row verifies."""
        return len(self.draft) + self.num_to_draft


class BatchPlan(msgspec.Struct, frozen=True):
    """Rows of one forward pass, of different sequences."""

    rows: Sequence[Row]


class RowResult(msgspec.Struct, frozen=True):
    """The result of a row; without tokens if the row chooses none.

    `token_ids` are the drafted tokens that were kept and the one that the target chose behind them.
    K and V of all of these but the last are in the block table now.
    """

    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0  # drafted tokens that were verified
    logprobs: tuple[Logprobs, ...] = ()  # one for each token, if the sampling requests them
    scored: tuple[Logprobs, ...] = ()  # one for each token of the row's `scored`
    embedding: bytes = b""  # fp32 [hidden] of the last token, if the model embeds

    @property
    def num_accepted(self) -> int:
        """Returns the number of drafted tokens that were kept."""
        return max(len(self.token_ids) - 1, 0)


class StepTimes(msgspec.Struct, frozen=True):
    """The parts of a step's time on the host, in seconds.

    A GPU computes while the host goes on. There `forward_s` ends when the passes are queued, and
    `sample_s` includes the wait for them. If the step was launched before the last one had ended,
    its time begins at that end.
    """

    prepare_s: float
    forward_s: float
    sample_s: float
    draft_s: float = 0.0  # the draft model's passes, which come first

    @property
    def total_s(self) -> float:
        """Returns the seconds of the whole step."""
        return self.draft_s + self.prepare_s + self.forward_s + self.sample_s


class BatchResult(msgspec.Struct, frozen=True):
    """The result of each row, and the step's times if the runner measures them."""

    rows: Sequence[RowResult]
    times: StepTimes | None = None

    @property
    def tokens(self) -> list[int | None]:
        """Returns the first token that each row chose; None for rows that choose none."""
        return [row.token_ids[0] if row.token_ids else None for row in self.rows]


class LaunchedStep(Protocol):
    """A step that a runner computes."""

    def result(self) -> BatchResult:
        """Waits for the step's end. From then on K and V of all its tokens are in the buffer, and
        the step accesses no memory any more.
        """
        ...


class Runner(Protocol):
    """Carries out batch plans on a KV buffer of `num_blocks` blocks, in the order of their launch.

    If `overlaps` is true, one step may be launched before `result` of the step before was called,
    and it may have pending rows. Otherwise `result` must be called before the next launch.
    """

    layout: KVLayout
    num_blocks: int
    overlaps: bool

    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Begins one forward pass."""
        ...
