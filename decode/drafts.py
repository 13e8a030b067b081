"""Plans the drafts of the running sequences before each step, and learns from the results.

A `Speculator` chooses the drafts. This module shortens the drafts to the token budget and the free
memory. A draft is either tokens from the sequence's own n-grams, or a number of tokens for the
draft model to propose. Drafted tokens get only blocks that no other sequence will need soon. Blocks
of rejected tokens are freed after the step.

The draft model may skip a sequence. The model computes its own K and V of skipped tokens when it
drafts for the sequence again, or when a block is full. Other workers can find a block only after
that.
"""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from decode.acceptance import Proposer
from decode.arrivals import DecodeMemory
from decode.choosing import MAX_UNSEEN_TOKENS, Candidate, Proposal
from decode.ngram import Match, Ngrams, follow
from decode.speculation import Speculator
from engine.messages import SeqId
from engine.worker.batch import Row, RowResult
from engine.worker.sequence import Sequence

CATCH_UP_TOKENS = 512  # most tokens for which the draft model catches up in one step


@dataclass(slots=True)
class _Draft:
    """A running sequence, and its draft in the latest planned step."""

    seq: Sequence
    ngrams: Any  # the sequence's tokens, opened by `Ngrams`; None without n-grams
    match: Match | None = None  # the match that the latest lookup found
    proposal: Proposal | None = None
    is_seen: bool = False  # True if the draft model computes the sequence's tokens in this step

    @property
    def is_proposed_by_model(self) -> bool:
        return self.proposal is not None and self.proposal.proposer is Proposer.DRAFT


class RowDraft(NamedTuple):
    """The fields of a row that describe its draft: see `engine.worker.batch.Row`."""

    draft: Items[int] = ()
    num_to_draft: int = 0
    draft_token_ids: Items[int] = ()


NO_DRAFT = RowDraft()


class DraftPlanner:
    """Plans the drafts of running sequences."""

    def __init__(
        self, speculator: Speculator, memory: DecodeMemory, counters: Counter[str]
    ) -> None:
        self.has_draft_model = speculator.has_draft_model
        self.speculator = speculator
        self._memory = memory
        self._block_size = memory.block_size
        self._counters = counters
        self._ngrams = Ngrams() if speculator.uses_ngrams else None
        self._drafts: dict[SeqId, _Draft] = {}
        # drafts with a proposal, or computed by the draft model, in the latest planned step
        self.marked: list[_Draft] = []

    def join(self, seq: Sequence) -> None:
        """Adds a sequence that joins the running batch."""
        ngrams = None if self._ngrams is None else self._ngrams.open(seq.token_ids)
        self._drafts[seq.seq_id] = _Draft(seq, ngrams)

    def leave(self, seq_id: SeqId) -> None:
        """Removes a sequence that leaves the running batch."""
        self.speculator.remove(seq_id)
        del self._drafts[seq_id]

    # ------------------------------------------------------------ before a step

    def plan(self, chosen: Items[Sequence], budget_tokens: int) -> bool:
        """Plans the drafts of the chosen sequences, and selects the sequences that the draft model
        computes.

        Returns True if anything is drafted.
        """
        speculator = self.speculator
        if not chosen:
            return False
        if self.marked:
            for draft in self.marked:
                draft.proposal, draft.is_seen = None, False
            self.marked = []
        if speculator.num_to_pass:
            return False
        proposed: list[_Draft] = []
        if not speculator.rests():
            proposed = self._propose(chosen, speculator, budget_tokens)
        seen = self._look(chosen, proposed, speculator) if self.has_draft_model else []
        self.marked = proposed + seen
        return bool(proposed)

    def _propose(
        self,
        chosen: Items[Sequence],
        speculator: Speculator,
        budget_tokens: int,
    ) -> list[_Draft]:
        """Returns the drafts that have a proposal in this step."""
        drafts = [self._drafts[seq.seq_id] for seq in chosen]
        num_context_tokens = sum([len(seq.token_ids) for seq in chosen])
        if self._ngrams is not None:
            matches = self._ngrams.find([draft.ngrams for draft in drafts])
            for draft, match in zip(drafts, matches, strict=True):
                draft.match = match
        if not speculator.weighs_draft_model(len(chosen), num_context_tokens):
            drafts = [draft for draft in drafts if draft.match is not None]
        candidates = self._candidates(drafts, speculator)
        proposals = speculator.plan(
            candidates,
            num_others=len(chosen) - len(drafts),
            others_tokens=num_context_tokens - sum([c.context_len for c in candidates]),
        )
        for proposal, draft in zip(proposals, drafts, strict=True):
            if proposal is None:
                continue
            num_tokens = min(proposal.num_tokens, budget_tokens)
            num_tokens = self._memory.allocate_for_draft(draft.seq, num_tokens)
            budget_tokens -= num_tokens
            if num_tokens == proposal.num_tokens:
                draft.proposal = proposal
            elif num_tokens:
                draft.proposal = msgspec.structs.replace(proposal, num_tokens=num_tokens)
        return [draft for draft in drafts if draft.proposal is not None]

    def _candidates(self, drafts: list[_Draft], speculator: Speculator) -> list[Candidate]:
        candidates = []
        for draft in drafts:
            seq = draft.seq
            candidates.append(
                Candidate(
                    seq_id=seq.seq_id,
                    context_len=len(seq.token_ids),
                    max_tokens=min(speculator.max_draft_tokens, seq.max_drafted()),
                    match_len=draft.match.length if draft.match is not None else 0,
                    num_unseen=seq.num_unseen_tokens,
                )
            )
        return candidates

    def _look(
        self, chosen: Items[Sequence], proposed: Items[_Draft], speculator: Speculator
    ) -> list[_Draft]:
        """Marks the sequences that the draft model computes in this step.

        These are the sequences with a proposal of the draft model, and sequences in which the draft
        model would complete a block. Returns only the latter sequences.
        """
        num_passes = 1
        for draft in proposed:
            if draft.is_proposed_by_model:
                draft.is_seen, num_passes = True, 0
        if not speculator.catches_up():
            return []
        block_size = self._block_size
        late = [
            self._drafts[seq.seq_id]
            for seq in chosen
            if len(seq.token_ids) // block_size > seq.num_draft_tokens // block_size
        ]
        late = [draft for draft in late if not draft.is_seen]
        late.sort(key=lambda draft: draft.seq.num_unseen_tokens)
        num_tokens, num_seen = 0, 0
        for draft in late:
            num_unseen = draft.seq.num_unseen_tokens
            if num_unseen > MAX_UNSEEN_TOKENS or (num_tokens and num_tokens > CATCH_UP_TOKENS):
                break
            num_tokens += num_unseen + 1
            num_seen += 1
        if not num_seen or not speculator.may_catch_up(num_tokens, num_passes):
            return []
        for draft in late[:num_seen]:
            draft.is_seen = True
        return late[:num_seen]

    def row_draft(self, seq: Sequence) -> RowDraft:
        """Returns the drafting fields for the sequence's row in the planned step."""
        draft = self._drafts[seq.seq_id]
        unseen = seq.token_ids[seq.num_draft_tokens :] if draft.is_seen else ()
        if draft.proposal is None:
            return RowDraft(draft_token_ids=unseen)
        if draft.is_proposed_by_model:
            return RowDraft(num_to_draft=draft.proposal.num_tokens, draft_token_ids=unseen)
        assert draft.match is not None
        tokens = follow(seq.token_ids, draft.match, draft.proposal.num_tokens)
        return RowDraft(draft=tokens, draft_token_ids=unseen)

    # ------------------------------------------------------------ after a step

    def num_seen(self, row: Row, result: RowResult, seq: Sequence) -> int | None:
        """Returns the number of tokens whose KV the draft model has; None without a draft model.

        The draft model has not computed the KV of the last token that it proposed.
        """
        if not self.has_draft_model:
            return None
        if not row.draft_token_ids:
            return seq.num_draft_tokens
        proposed = result.num_drafted if row.num_to_draft else 0
        num_seen = row.end + min(result.num_accepted, max(proposed - 1, 0))
        return min(num_seen, len(seq.token_ids))

    def learn(self, seq_id: SeqId, result: RowResult, num_accepted: int) -> None:
        """Learns from a verified draft. `num_accepted` excludes tokens past the answer's end."""
        proposal = self._drafts[seq_id].proposal
        if proposal is None:
            return
        self._counters[f"drafted:{proposal.proposer}"] += result.num_drafted
        self._counters[f"accepted:{proposal.proposer}"] += num_accepted
        self._counters[f"accepted_len:{num_accepted}"] += 1
        self.speculator.learn(
            seq_id, proposal, num_drafted=result.num_drafted, num_accepted=result.num_accepted
        )
