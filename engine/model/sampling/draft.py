"""A draft model's proposals: tokens that may follow a row.

A draft model chooses each proposed token in the same way as the target will: with the noise of its
position, and with the same penalties, bans and grammar. If the models' distributions are similar,
most of their tokens are equal.

1. One pass over all rows whose K and V the draft model must compute. For rows that propose, the
   pass also computes the logits of the last token. Some rows also contain tokens of earlier steps
   from which the draft model was left out.
2. Each row that proposes chooses its next token.
3. One pass over this token of each row that proposes more tokens. Steps 2 and 3 repeat. K and V of
   the last proposed token are not computed here.

K and V of rejected tokens are harmless, in both models. They are after the end of the sequence,
where nothing reads. The token that is later at this position is computed, and its K and V stored,
before anything reads them. Block hashes cover only tokens that were kept.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from engine.model.sampling.changes import TokenChoice
from engine.worker.batch import Row

MASK_THREADS = 2


@dataclass(slots=True)
class DraftedRow:
    """A row, and the tokens that were proposed so far to follow it."""

    row: Row
    token_ids: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(
        default_factory=list
    )  # for each token, and for the token after the last

    def choice(self, nth: int) -> TokenChoice:
        """Returns how to choose the token after the first `nth` proposed tokens."""
        row = self.row
        return TokenChoice(
            row.sampling,
            row.end + nth,
            row.banned,
            row.history,
            self.token_ids[:nth],
            row.prompt_len,
            self.masks[nth] if row.guide is not None else None,
        )

    def verified(self) -> Row:
        """Returns the row that the target computes to verify the proposed tokens."""
        if not self.token_ids:
            return self.row
        tokens = [*self.row.token_ids, *self.token_ids]
        return _bare(self.row, tokens, self.row.start)

    def seen(self) -> Row:
        """Returns the row that the draft model computes first. It may begin before the target's
        row.
        """
        tokens = self.row.draft_token_ids
        if len(tokens) == len(self.row.token_ids):
            return self.row
        return _bare(self.row, tokens, self.row.end - len(tokens))


class Masks:
    """Computes masks of grammars on threads of its own, during forward passes."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, proposals: Sequence[DraftedRow]) -> Callable[[], None]:
        """Starts to compute the masks of all rows with a guide. Returns a function that waits for
        the masks.

        Until that function has returned, the caller must not use the proposals or their guides.
        """
        if not has_guide(proposals):
            return _nothing_to_wait_for
        guided = [p for p in proposals if p.row.guide is not None and p.row.sampling is not None]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MASK_THREADS, "masks")
        shares = (guided[i::MASK_THREADS] for i in range(MASK_THREADS))
        jobs = [self._pool.submit(_complete_masks, share) for share in shares]

        def wait() -> None:
            for job in jobs:
                job.result()

        return wait

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class Forward(Protocol):
    """The forward passes of the draft model: `CpuForward` or `CudaForward`."""

    def prepare(self, rows: Sequence[Row], keep: Sequence[int]) -> object:
        """Returns the inputs of `launch`."""
        ...

    def launch(self, prepared: object) -> torch.Tensor:
        """Computes the logits of the tokens to keep."""
        ...

    def sample(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        """Chooses one token for each row of logits."""
        ...


def draft_step_by_step(forward: Forward, proposals: Sequence[DraftedRow], masks: Masks) -> None:
    """Computes the rows whose KV the draft model needs, rows that propose first, and proposes
    tokens.
    """
    rows = [proposal.seen() for proposal in proposals]
    proposing = [proposal for proposal in proposals if proposal.row.num_to_draft > 0]
    keep = last_tokens(rows[: len(proposing)])
    while True:
        prepared = forward.prepare(rows, keep)
        wait = masks.start(proposing)
        logits = forward.launch(prepared)
        wait()
        if not proposing:
            return
        choices = [proposal.choice(len(proposal.token_ids)) for proposal in proposing]
        for proposal, token in zip(
            proposing, forward.sample(logits, choices).tolist(), strict=True
        ):
            proposal.token_ids.append(token)
        proposing = [p for p in proposing if len(p.token_ids) < p.row.num_to_draft]
        if not proposing:
            return
        rows = [_bare(p.row, p.token_ids[-1:], p.row.end + len(p.token_ids) - 1) for p in proposing]
        keep = range(len(rows))


def has_guide(proposals: Sequence[DraftedRow]) -> bool:
    """True if any row has to follow a grammar."""
    return any(proposal.row.guide is not None for proposal in proposals)


def last_tokens(rows: Sequence[Row]) -> list[int]:
    """Returns the index, in the flat batch, of each row's last token."""
    last = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        last.append(end - 1)
    return last


def _bare(row: Row, token_ids: Sequence[int], start: int) -> Row:
    """Returns a row with other tokens of the same sequence. The row chooses no token."""
    return Row(row.seq_id, token_ids, start, row.block_table, None)


def _complete_masks(proposals: Sequence[DraftedRow]) -> None:
    for proposal in proposals:
        made = proposal.row.guide.masks(proposal.token_ids)
        proposal.masks.extend(made[len(proposal.masks) :])


def _nothing_to_wait_for() -> None:
    pass
