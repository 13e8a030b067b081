"""Sequences that have a token each in every step, counted instead of written down.

For who prices steps and does not run them: as long as no block fills up and no answer ends, a step
changes nothing of its sequences but their lengths, all by one. So only the steps are counted, and a
sequence is brought up to date when something happens to it. What a stretch of steps costs here
does not depend on how many sequences there are, nor on how many steps.

Not known here: memory that sequences will need, and who is told.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from engine.messages import SeqId
from engine.worker.blocks import BlockPool
from engine.worker.sequence import Sequence

NextTokens = Callable[[Sequence, int], Items[int]]


class Alike(NamedTuple):
    """Steps of the same rows, one token each. The context is that of the first step."""

    num_rows: int
    num_context_tokens: int
    num_steps: int


@dataclass(slots=True)
class _Member:
    seq: Sequence
    place: int  # in the order of joining
    as_of: int  # the step after which the sequence was as it is written down
    num_blocks: int
    due: int = -1  # its block is full after this step, or its answer over


_place = attrgetter("place")


class Lockstep:
    """Sequences whose every token is the next one of `choose(sequence, number)`.

    They have no grammar, penalties or stop tokens: what is chosen changes nothing but the tokens.
    """

    def __init__(self, pool: BlockPool, choose: NextTokens) -> None:
        self._pool = pool
        self._choose = choose
        self._members: dict[SeqId, _Member] = {}
        self._step = 0
        self._num_joined = 0
        self._due: list[tuple[int, int, _Member]] = []  # a heap; some are due at another time now
        self._changed: list[_Member] = []  # when they are due next has not been said
        self._begun: list[_Member] = []  # their first step is one of the next
        self.num_context_tokens = 0
        self.num_blocks = 0  # that their present lengths need

    def __len__(self) -> int:
        return len(self._members)

    def join(self, seq: Sequence) -> None:
        """It has a token in every step from now on."""
        assert seq.guide is None
        assert seq.history is None
        assert not seq.limits.stop_token_ids
        member = _Member(seq, self._num_joined, self._step, seq.num_blocks)
        self._num_joined += 1
        self._members[seq.seq_id] = member
        self._changed.append(member)
        self.num_context_tokens += len(seq.token_ids)
        self.num_blocks += member.num_blocks

    def leave(self, seq_id: SeqId) -> None:
        """It has no more; what it has is written down."""
        member = self._members.pop(seq_id)
        self._update(member)
        self.num_context_tokens -= len(member.seq.token_ids)
        self.num_blocks -= member.num_blocks

    def changed(self) -> list[Sequence]:
        """Those that have joined or were due: they may lack a block. In the order of joining."""
        self._changed = self._present(self._changed)
        return [member.seq for member in self._changed]

    def plan(self, begun: Iterable[SeqId]) -> int:
        """All have the blocks that they need: after how many steps the next one is due.

        For those that have `begun` the first of these is their first.
        """
        for member in self._present(self._changed):
            seq = member.seq
            length = len(seq.token_ids)
            until_full = len(seq.block_table) * seq.block_size - length + 1
            member.due = self._step + min(until_full, seq.limits.max_len - length)
            heappush(self._due, (member.due, member.place, member))
        self._changed = []
        self._begun = [self._members[seq_id] for seq_id in begun]
        while self._due and not self._is_due(*self._due[0]):
            heappop(self._due)
        return self._due[0][0] - self._step if self._due else 0

    def go(self, num_steps: int) -> list[Sequence]:
        """So many steps have been run, no more than `plan` said. Who was due then, or had begun, in
        the order of joining.
        """
        self._step += num_steps
        self.num_context_tokens += num_steps * len(self._members)
        over: dict[int, _Member] = {member.place: member for member in self._begun}
        while self._due and self._due[0][0] <= self._step:
            entry = heappop(self._due)
            if self._is_due(*entry):
                member = entry[2]
                assert member.due == self._step, "it was due before"
                over[member.place] = member
                self._changed.append(member)
        self._begun = []
        in_order = [over[place] for place in sorted(over)]
        for member in in_order:
            self._update(member)
        return [member.seq for member in in_order]

    def catch_up(self) -> None:
        """Writes down all that has been counted."""
        for member in self._members.values():
            self._update(member)

    def _is_due(self, due: int, _: int, member: _Member) -> bool:
        return member.due == due and self._members.get(member.seq.seq_id) is member

    def _present(self, members: Iterable[_Member]) -> list[_Member]:
        here = [m for m in members if self._members.get(m.seq.seq_id) is m]
        here.sort(key=_place)
        return here

    def _update(self, member: _Member) -> None:
        num_tokens = self._step - member.as_of
        if not num_tokens:
            return
        member.as_of = self._step
        seq = member.seq
        seq.token_ids += self._choose(seq, num_tokens)
        seq.advance(num_tokens, self._pool)
        self.num_blocks += seq.num_blocks - member.num_blocks
        member.num_blocks = seq.num_blocks
