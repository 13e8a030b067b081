"""The running batch: sequences with a row in every step, and the memory for their next tokens.

If memory runs short, copies are dropped first. Then the youngest running sequence is given back to
the gateway, which continues it elsewhere or later with the same tokens. Its blocks stay cached.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from decode.drafts import DraftPlanner
from engine.messages import PREEMPTED, DecodeStarted, GivenBack, SeqId
from engine.worker.batch import Row
from engine.worker.blocks import BlockPool
from engine.worker.events import Effect, Emit
from engine.worker.sequence import Sequence

PENDING = (0,)  # placeholder token ids of a row whose token the step in flight will choose


class RunningBatch:
    """Sequences that run, oldest first. Owns their blocks."""

    def __init__(self, pool: BlockPool, drafts: DraftPlanner, counters: Counter[str]) -> None:
        self._pool = pool
        self._drafts = drafts
        self._counters = counters
        self._members: dict[SeqId, Sequence] = {}
        self._joined: set[SeqId] = set()  # sequences that have joined and not run yet

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq_id: SeqId) -> bool:
        return seq_id in self._members

    def __getitem__(self, seq_id: SeqId) -> Sequence:
        return self._members[seq_id]

    def seqs(self) -> list[Sequence]:
        """Returns the sequences oldest first."""
        return list(self._members.values())

    # ------------------------------------------------------------ joining and leaving

    def join(self, seq: Sequence) -> None:
        """Adds a sequence whose KV is here. It runs from the next step on."""
        self._drafts.join(seq)
        self._members[seq.seq_id] = seq
        self._joined.add(seq.seq_id)

    def leave(self, seq_id: SeqId) -> Sequence:
        """Removes a sequence and returns it, with its blocks."""
        self._drafts.leave(seq_id)
        self._joined.discard(seq_id)
        return self._members.pop(seq_id)

    def end(self, seq_id: SeqId) -> Sequence:
        """Removes a sequence and releases its blocks."""
        seq = self.leave(seq_id)
        seq.release(self._pool)
        return seq

    def start(self, seqs: Iterable[Sequence]) -> list[Effect]:
        """Marks sequences as run; announces each one that runs for the first time."""
        joined = self._joined
        if not joined:
            return []
        new = [seq for seq in seqs if seq.seq_id in joined]
        joined.difference_update([seq.seq_id for seq in new])
        return [Emit(seq.gateway_id, DecodeStarted(seq.seq_id)) for seq in new]

    def due(self) -> list[Sequence]:
        """Returns the sequences that have a next row, oldest first.

        A sequence has no next row if the step in flight brings its last token.
        """
        return [
            seq
            for seq in self._members.values()
            if not seq.in_flight or len(seq.token_ids) + len(seq.in_flight) < seq.limits.max_len
        ]

    def row(self, seq: Sequence) -> Row:
        """Returns the sequence's row in the planned step."""
        draft, limits = self._drafts.row_draft(seq), seq.limits
        is_pending = bool(seq.in_flight)
        row = Row(
            seq.seq_id,
            PENDING if is_pending else [seq.token_ids[-1]],
            seq.num_planned_tokens if is_pending else seq.num_computed_tokens,
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
        return row

    def land(self, row: Row) -> Sequence | None:
        """Returns the sequence of a row whose step has ended; None if the sequence has ended."""
        seq = self._members.get(row.seq_id)
        return seq if seq is not None and seq.lands(row) else None

    # ------------------------------------------------------------ memory

    def has_room(self) -> bool:
        """True if there are idle blocks for the next tokens of all sequences."""
        missing = (_num_blocks(seq) - len(seq.block_table) for seq in self.due())
        return sum(max(num, 0) for num in missing) <= self._pool.num_idle

    def make_room(
        self, due: Iterable[Sequence], drop_copy: Callable[[], Effect | None]
    ) -> list[Effect]:
        """Gives every sequence that is due the blocks of its next tokens.

        Without memory `drop_copy` is called. If that frees nothing (None), the youngest running
        sequence is given back, even if it is the sequence that needs the block.
        """
        effects: list[Effect] = []
        short = [
            seq.seq_id
            for seq in due
            if len(seq.block_table) * seq.block_size <= seq.num_computed_tokens + len(seq.in_flight)
        ]
        for seq_id in short:
            effects += self._give_blocks(seq_id, drop_copy)
        return effects

    def _give_blocks(self, seq_id: SeqId, drop_copy: Callable[[], Effect | None]) -> list[Effect]:
        if seq_id not in self._members:  # given back to free memory for another sequence
            return []
        effects: list[Effect] = []
        seq = self[seq_id]
        while len(seq.block_table) < _num_blocks(seq):
            if self._pool.num_idle:
                seq.block_table += self._pool.allocate(1)
            elif (dropped := drop_copy()) is not None:
                effects.append(dropped)
            else:
                youngest = next(reversed(self._members))
                effects.append(self._preempt(youngest))
                if youngest == seq_id:
                    break
        return effects

    def _preempt(self, seq_id: SeqId) -> Effect:
        self._counters["preempted"] += 1
        seq = self.end(seq_id)
        return Emit(seq.gateway_id, GivenBack(seq_id, PREEMPTED))

    @property
    def num_blocks(self) -> int:
        """The number of blocks that all sequences together need."""
        return sum([seq.num_blocks for seq in self._members.values()])

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens of all sequences together."""
        return sum([len(seq.token_ids) for seq in self._members.values()])

    def validate(self) -> None:
        """Asserts the invariants of running sequences."""
        assert self._joined <= self._members.keys()
        for seq in self.seqs():
            assert seq.num_computed_tokens == len(seq.token_ids) - 1
            is_drafted = any(row.max_drafted for row in seq.in_flight)
            assert is_drafted or len(seq.block_table) <= _num_blocks(seq)
            assert len(seq.in_flight) <= 2
            assert self._drafts.has_draft_model or seq.num_unseen_tokens == 0


def _num_blocks(seq: Sequence) -> int:
    """Returns the blocks that all tokens need, pending ones too."""
    return -(-(len(seq.token_ids) + len(seq.in_flight)) // seq.block_size)
