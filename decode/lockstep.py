"""Counts steps in which every sequence gets one token, instead of writing each token down.

It serves the simulator, which prices steps without running them. As long as no block fills up and
no answer ends, a step only makes each sequence one token longer. So the steps are counted, and a
sequence is brought up to date when something happens to it. The cost of a stretch of steps depends
neither on the number of sequences nor on the number of steps.

Memory for later tokens, and messages to gateways, are the scheduler's concern.
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
    as_of: int  # the step up to which the sequence is written down
    num_blocks: int
    due: int = -1  # the step that fills its block or ends its answer


_place = attrgetter("place")


class Lockstep:
    """Sequences whose next `n` tokens are `choose(sequence, n)`.

    They have no grammar, penalties or stop tokens, so the choice changes nothing but the tokens.
    """

    def __init__(self, pool: BlockPool, choose: NextTokens) -> None:
        self._pool = pool
        self._choose = choose
        self._members: dict[SeqId, _Member] = {}
        self._step = 0
        self._num_joined = 0
        self._due: list[tuple[int, int, _Member]] = []  # a heap; entries may be out of date
        self._changed: list[_Member] = []  # members without a due step
        self._begun: list[_Member] = []  # members whose first step is the next one
        self.num_context_tokens = 0
        self.num_blocks = 0  # that the present lengths need

    def __len__(self) -> int:
        return len(self._members)

    def join(self, seq: Sequence) -> None:
        """Adds a sequence, which gets a token in every step from now on."""
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
        """Removes a sequence and writes its tokens down."""
        member = self._members.pop(seq_id)
        self._update(member)
        self.num_context_tokens -= len(member.seq.token_ids)
        self.num_blocks -= member.num_blocks

    def changed(self) -> list[Sequence]:
        """Returns sequences that joined or were due, in order of joining. They may lack a block."""
        self._changed = self._present(self._changed)
        return [member.seq for member in self._changed]

    def plan(self, begun: Iterable[SeqId]) -> int:
        """Returns after how many steps the next sequence is due. All must have their blocks.

        For the sequences in `begun`, the next step is their first.
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
        """Counts steps, at most as many as `plan` returned.

        Returns the sequences that were due or had begun, in order of joining.
        """
        self._step += num_steps
        self.num_context_tokens += num_steps * len(self._members)
        over: dict[int, _Member] = {member.place: member for member in self._begun}
        while self._due and self._due[0][0] <= self._step:
            entry = heappop(self._due)
            if self._is_due(*entry):
                member = entry[2]
                assert member.due == self._step, "more steps than planned"
                over[member.place] = member
                self._changed.append(member)
        self._begun = []
        in_order = [over[place] for place in sorted(over)]
        for member in in_order:
            self._update(member)
        return [member.seq for member in in_order]

    def catch_up(self) -> None:
        """Writes all counted tokens down."""
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
