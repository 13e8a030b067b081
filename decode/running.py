"""The running batch: the sequences with a row in every step, and the memory for their next tokens.

If memory runs short, copies of sequences that run elsewhere are dropped first. Then the youngest
running sequence is given back to the gateway, which continues the sequence at another worker or
later, with the same tokens. The sequence's blocks stay cached.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from decode.arrivals import DecodeMemory
from decode.drafts import NO_DRAFT, DraftPlanner
from engine.messages import PREEMPTED, DecodeStarted, GivenBack, SeqId
from engine.worker.batch import Row
from engine.worker.events import Effect, Emit
from engine.worker.sequence import Sequence

PENDING = (0,)  # stands for the token of a row that the step in flight has not chosen yet


class RunningBatch:
    """The running sequences, oldest first. Owns their blocks."""

    def __init__(
        self, memory: DecodeMemory, drafts: DraftPlanner | None, counters: Counter[str]
    ) -> None:
        self._pool = memory.pool
        self._drafts = drafts
        self._counters = counters
        self.members = memory.running
        # ids of sequences that have joined the batch and not run yet
        self.joined: set[SeqId] = set()

    # ------------------------------------------------------------ joining and leaving

    def join(self, seq: Sequence) -> None:
        """Adds a sequence whose KV is complete. It runs from the next step on."""
        if self._drafts is not None:
            self._drafts.join(seq)
        self.members[seq.seq_id] = seq
        self.joined.add(seq.seq_id)

    def leave(self, seq_id: SeqId) -> Sequence:
        """Removes a sequence, and returns it with its blocks."""
        if self._drafts is not None:
            self._drafts.leave(seq_id)
        self.joined.discard(seq_id)
        return self.members.pop(seq_id)

    def remove(self, seq_id: SeqId) -> Sequence:
        """Removes a sequence and releases its blocks."""
        seq = self.leave(seq_id)
        seq.release(self._pool)
        return seq

    def start(self, seqs: Iterable[Sequence]) -> list[Effect]:
        """Records that sequences run in a step. Announces each sequence that runs for the first
        time.
        """
        joined = self.joined
        new = [seq for seq in seqs if seq.seq_id in joined]
        joined.difference_update([seq.seq_id for seq in new])
        return [Emit(seq.gateway_id, DecodeStarted(seq.seq_id)) for seq in new]

    def due(self) -> tuple[list[Sequence], list[SeqId]]:
        """Returns the sequences that need a next row, and the ids of those without a block for the
        row.

        Both lists are ordered, oldest first. A sequence needs no next row if the step in flight
        will compute its last token.
        """
        due, short = [], []
        for seq in self.members.values():
            num_pending = len(seq.in_flight)
            if not num_pending or len(seq.token_ids) + num_pending < seq.limits.max_len:
                due.append(seq)
                if len(seq.block_table) * seq.block_size <= seq.num_computed_tokens + num_pending:
                    short.append(seq.seq_id)
        return due, short

    def rows(self, seqs: Items[Sequence]) -> list[Row]:
        """Returns the rows of these sequences for the planned step."""
        rows, drafts = [], self._drafts
        for seq in seqs:
            limits, is_pending = seq.limits, bool(seq.in_flight)
            draft = drafts.row_draft(seq) if drafts is not None and drafts.marked else NO_DRAFT
            row = Row(
                seq.seq_id,
                PENDING if is_pending else [seq.token_ids[-1]],
                seq.num_computed_tokens + is_pending,
                seq.block_table,
                seq.sampling,
                seq.banned(num_pending=is_pending) if limits.min_len else (),
                draft.draft,
                draft.num_to_draft,
                draft.draft_token_ids,
                seq.history,
                limits.prompt_len,
                seq.guide,
                is_pending=is_pending,
                tpot_s=limits.tpot_s,
            )
            seq.in_flight.append(row)
            rows.append(row)
        return rows

    # ------------------------------------------------------------ memory

    def has_room(self) -> bool:
        """Returns True if enough blocks are idle for the next tokens of all sequences."""
        missing = (_num_blocks(seq) - len(seq.block_table) for seq in self.due()[0])
        return sum(max(num, 0) for num in missing) <= self._pool.num_idle

    def make_room(
        self, short: Iterable[SeqId], drop_copy: Callable[[], Effect | None]
    ) -> list[Effect]:
        """Gives sequences the blocks of their next tokens.

        If memory is short, `drop_copy` is called. If `drop_copy` returns None, no copy is left.
        Then the youngest running sequence is given back, even if that sequence needs the block.
        """
        effects: list[Effect] = []
        for seq_id in short:
            # None if this sequence was given back to free memory for another sequence
            seq = self.members.get(seq_id)
            while seq is not None and len(seq.block_table) < _num_blocks(seq):
                if self._pool.num_idle:
                    seq.block_table += self._pool.allocate(1)
                elif (dropped := drop_copy()) is not None:
                    effects.append(dropped)
                else:
                    youngest = next(reversed(self.members))
                    effects.append(self._preempt(youngest))
                    seq = self.members.get(seq_id)
        return effects

    def _preempt(self, seq_id: SeqId) -> Effect:
        self._counters["preempted"] += 1
        seq = self.remove(seq_id)
        return Emit(seq.gateway_id, GivenBack(seq_id, PREEMPTED))

    def validate(self) -> None:
        """Asserts the invariants of running sequences."""
        assert self.joined <= self.members.keys()
        for seq in self.members.values():
            assert seq.num_computed_tokens == len(seq.token_ids) - 1
            is_drafted = any(row.draft or row.num_to_draft for row in seq.in_flight)
            assert is_drafted or len(seq.block_table) <= _num_blocks(seq)
            assert len(seq.in_flight) <= 2
            has_draft_model = self._drafts is not None and self._drafts.has_draft_model
            assert has_draft_model or seq.num_unseen_tokens == 0


def _num_blocks(seq: Sequence) -> int:
    """Returns the number of blocks that all tokens need, including pending tokens."""
    return -(-(len(seq.token_ids) + len(seq.in_flight)) // seq.block_size)
