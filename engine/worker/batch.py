"""What a step computes, as integers: the seam between schedulers and the runner.

One shape serves everything: each row extends one sequence's context by `q` tokens, whether those
are a prefill chunk (`q` = chunk), a decode step (`q` = 1) or the verification of a draft of k
tokens (`q` = k + 1): the row's own token and the drafted ones behind it.

A drafted token is kept if it is what the target chooses there, with the noise of that position.
What follows the last one kept is the target's choice too, so a row that drafts k tokens comes to
between 1 and k + 1, and to the same ones that k + 1 steps without a draft would have come to.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.grammar.guide import Guide
from engine.layout import KVLayout
from engine.messages import Logprobs, Sampling, SeqId
from engine.worker.blocks import BlockId


class Row(msgspec.Struct, frozen=True):  # made in a fifth of a dataclass's time
    """Compute `token_ids` at positions `start`, `start + 1`, …; K and V go into the block table.

    With `sampling`, also choose the token that follows; `banned` ids are never chosen. The block
    table has room for the drafted tokens too. The rest is for some rows only:

    `draft`            tokens that may follow, proposed by whoever made this row; or
    `num_to_draft`     how many the draft model shall propose
    `draft_token_ids`  tokens that end with `token_ids`, whose K and V the draft model computes; it
                       leaves a row out that has none, and proposes nothing for it
    `history`          all tokens up to the last of `token_ids`, where penalties need to know them;
                       the answer begins at `prompt_len`
    `guide`            where a grammar stands after `token_ids`
    `scored`           tokens known to follow each of `token_ids`, from the first on: their
                       log-probabilities are wanted, and `num_top` of the likeliest beside each
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

    @property
    def end(self) -> int:
        """Context length after this row, drafts aside: the position of the token it chooses."""
        return self.start + len(self.token_ids)

    @property
    def max_drafted(self) -> int:
        """Tokens that are verified at most, beyond the row's own."""
        return len(self.draft) + self.num_to_draft


class BatchPlan(msgspec.Struct, frozen=True):
    """Rows of one forward pass, of different sequences."""

    rows: Sequence[Row]


class RowResult(msgspec.Struct, frozen=True):
    """What a row came to: nothing where it chooses no token.

    `token_ids` are the drafted tokens that were kept and the one that the target chose behind them.
    K and V of all of these but the last are in the block table now.
    """

    token_ids: tuple[int, ...] = ()
    num_drafted: int = 0  # verified
    logprobs: tuple[Logprobs, ...] = ()  # one a token, where the sampling asks for them
    scored: tuple[Logprobs, ...] = ()  # one for each of the row's `scored`

    @property
    def num_accepted(self) -> int:
        """Of the drafted tokens, those that were kept."""
        return max(len(self.token_ids) - 1, 0)


class StepTimes(msgspec.Struct, frozen=True):
    """Where a step's time went on the host, in seconds.

    A GPU computes while the host goes on: there `forward_s` is the time until the passes are
    queued, and `sample_s` holds the wait for them.
    """

    prepare_s: float
    forward_s: float
    sample_s: float
    draft_s: float = 0.0  # the draft model's passes, before all that

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.draft_s + self.prepare_s + self.forward_s + self.sample_s


class BatchResult(msgspec.Struct, frozen=True):
    """What each row came to, and how long it took where the runner says."""

    rows: Sequence[RowResult]
    times: StepTimes | None = None

    @property
    def tokens(self) -> list[int | None]:
        """The first token that each row chose, None where it chooses none."""
        return [row.token_ids[0] if row.token_ids else None for row in self.rows]


class Runner(Protocol):
    """Carries out batch plans on a KV buffer of `num_blocks` blocks."""

    layout: KVLayout
    num_blocks: int

    def run(self, plan: BatchPlan) -> BatchResult:
        """Runs one forward pass; afterwards K and V of all its tokens are in the buffer."""
        ...
