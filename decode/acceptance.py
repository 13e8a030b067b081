"""Estimates the probability that the target keeps a drafted token, from counts that decay slowly.

Tokens of a draft are kept up to the first wrong token. So if `a` tokens were kept, there were `a`
hits in `a` tries, and one more try if some token was rejected. A sequence without counts of its own
gets the average of all sequences. A sequence's counts also decay while nothing is drafted for the
sequence.
"""

from collections import defaultdict
from collections.abc import Container
from enum import StrEnum

from engine.messages import SeqId


class Proposer(StrEnum):
    """The source of drafted tokens."""

    NGRAM = "ngram"
    DRAFT = "draft"


Kind = tuple[Proposer, int]  # the proposer, and the length of the match if the proposer is n-grams

DRAFT: Kind = (Proposer.DRAFT, 0)
NGRAMS: dict[int, Kind] = {length: (Proposer.NGRAM, length) for length in (2, 3, 4, 8, 16)}

# The assumed share of kept tokens before any try. This share weighs as `_FIRST_TRIES` tries.
_FIRST = {
    DRAFT: 0.6,
    NGRAMS[2]: 0.3,
    NGRAMS[3]: 0.5,
    NGRAMS[4]: 0.7,
    NGRAMS[8]: 0.85,
    NGRAMS[16]: 0.9,
}
_FIRST_TRIES = 6.0
_TRIES_OF_ALL = 4.0  # weight of the counts of all sequences, in tries of one sequence
_MEMORY_OF_ALL = 0.993  # factor by which each new try reduces the weight of older tries
_MEMORY_OF_ONE = 0.97
# factor by which a step without a draft reduces the weight of a sequence's counts
_MEMORY_WHILE_IDLE = 0.98
_HIGHEST = 0.995  # upper bound of a share; with a share of 1 drafts would have no limit


class _Count:
    __slots__ = ("hits", "tries")

    def __init__(self, hits: float = 0.0, tries: float = 0.0) -> None:
        self.hits = hits
        self.tries = tries

    def add(self, hits: int, tries: int, memory: float) -> None:
        kept = memory**tries
        self.hits = self.hits * kept + hits
        self.tries = self.tries * kept + tries


class Acceptance:
    """The share of drafted tokens that the target keeps, by sequence and kind of proposal."""

    def __init__(self) -> None:
        self._all = {kind: _Count(p * _FIRST_TRIES, _FIRST_TRIES) for kind, p in _FIRST.items()}
        self._one: defaultdict[SeqId, dict[Kind, _Count]] = defaultdict(dict)

    def of(self, seq_id: SeqId, kind: Kind) -> float:
        """Returns the share of a sequence's next draft that the target is expected to keep."""
        average = self._all[kind]
        share = average.hits / average.tries
        own = self._one.get(seq_id)
        if own is not None and (count := own.get(kind)) is not None:
            share = (count.hits + _TRIES_OF_ALL * share) / (count.tries + _TRIES_OF_ALL)
        return min(share, _HIGHEST)

    def learn(self, seq_id: SeqId, kind: Kind, num_drafted: int, num_accepted: int) -> None:
        """Counts the kept and rejected tokens of a verified draft."""
        tries = num_accepted + (num_accepted < num_drafted)
        own = self._one[seq_id].setdefault(kind, _Count())
        if own.tries < _TRIES_OF_ALL:
            self._all[kind].add(num_accepted, tries, _MEMORY_OF_ALL)
        own.add(num_accepted, tries, _MEMORY_OF_ONE)

    def highest(self, kind: Kind) -> float:
        """Returns the highest share of this kind that `of` returns for any sequence."""
        average = self._all[kind]
        known = [seq_id for seq_id, own in self._one.items() if kind in own]
        return max([average.hits / average.tries, *(self.of(seq_id, kind) for seq_id in known)])

    def idle(self, drafting: Container[SeqId], num_steps: int) -> None:
        """Decays the counts of all sequences by `num_steps` steps without drafts."""
        memory = _MEMORY_WHILE_IDLE**num_steps
        for seq_id, own in self._one.items():
            if seq_id not in drafting:
                for count in own.values():
                    count.hits *= memory
                    count.tries *= memory

    def remove(self, seq_id: SeqId) -> None:
        """Removes the counts of a sequence."""
        self._one.pop(seq_id, None)
