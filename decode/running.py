"""The running batch: sequences with a row in every step, and the memory for their next tokens.

If memory runs short, copies are dropped first. Then the youngest running sequence is given back to
the gateway, which continues it elsewhere or later with the same tokens. Its blocks stay cached.
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

PENDING = (0,)  # placeholder token ids of a row whose token the step in flight will choose


class RunningBatch:
    """Sequences that run, oldest first. Owns their blocks."""

    def __init__(
        self, memory: DecodeMemory, drafts: DraftPlanner | None, counters: Counter[str]
    ) -> None:
        self._pool = memory.pool
        self._drafts = drafts
        self._counters = counters
        self.members = memory.running
        self.joined: set[SeqId] = set()  # sequences that have joined and not run yet

    # ------------------------------------------------------------ joining and leaving

    def join(self, seq: Sequence) -> None:
        """Adds a sequence whose KV is here. It runs from the next step on."""
        if self._drafts is not None:
            self._drafts.join(seq)
        self.members[seq.seq_id] = seq
        self.joined.add(seq.seq_id)

    def leave(self, seq_id: SeqId) -> Sequence:
        """Removes a sequence and returns it, with its blocks."""
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
        """Marks sequences as run; announces each one that runs for the first time."""
        joined = self.joined
        new = [seq for seq in seqs if seq.seq_id in joined]
        joined.difference_update([seq.seq_id for seq in new])
        return [Emit(seq.gateway_id, DecodeStarted(seq.seq_id)) for seq in new]

    def due(self) -> tuple[list[Sequence], list[SeqId]]:
        """Returns the sequences that have a next row, oldest first, and those without a block for
        their next token.

        A sequence has no next row if the step in flight brings its last token.
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
        """Returns the sequences' rows in the planned step."""
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
        """True if there are idle blocks for the next tokens of all sequences."""
        missing = (_num_blocks(seq) - len(seq.block_table) for seq in self.due()[0])
        return sum(max(num, 0) for num in missing) <= self._pool.num_idle

    def make_room(
        self, short: Iterable[SeqId], drop_copy: Callable[[], Effect | None]
    ) -> list[Effect]:
        """Gives sequences the blocks of their next tokens.

        Without memory `drop_copy` is called. If that frees nothing (None), the youngest running
        sequence is given back, even if it is the sequence that needs the block.
        """
        effects: list[Effect] = []
        for seq_id in short:
            seq = self.members.get(seq_id)  # None if given back to free memory for another sequence
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
    """Returns the blocks that all tokens need, pending ones too."""
    return -(-(len(seq.token_ids) + len(seq.in_flight)) // seq.block_size)
