"""Which prompts go on with a conversation, and if such prompts are followed more than others.

The next prompt of a conversation repeats the last one and adds an answer and a question. So a
prompt goes on if it begins with all full blocks of an earlier one, and if these are most of it. In
many loads it is more likely to be followed by yet another than one that begins a conversation, or
that adds much to what it shares. Where that was so lately, its blocks are
*likely reused*: workers keep them longer (`engine.worker.blocks`).

Of each prompt the hash of its last full block is remembered, which covers all blocks before.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.worker.blocks import BlockHash

MEMORY = 65_536  # prompts that are remembered; after as many, old counts weigh half
MOST = 0.7  # share of a prompt
ENOUGH = 64  # prompts that went on; with fewer, nothing is said of them
FOLLOWED_MORE = 1.3  # times as often as others


class Conversations:
    """The latest prompts of this gateway."""

    def __init__(self) -> None:
        # Ends of prompts, the oldest first: if they went on, or None once they were followed.
        self._ends: OrderedDict[BlockHash, bool | None] = OrderedDict()
        self._num = [0.0, 0.0]  # prompts: others, and continued ones
        self._num_followed = [0.0, 0.0]  # how many of these were continued

    def record(self, hashes: Sequence[BlockHash]) -> bool:
        """Records a prompt by its full blocks. Returns True if they are likely to be reused."""
        if not hashes:
            return False
        ends, goes_on = self._ends, False
        if not ends.keys().isdisjoint(hashes):
            at = next(i for i in reversed(range(len(hashes))) if hashes[i] in ends)
            goes_on = at >= int(MOST * len(hashes))
            if (went_on := ends[hashes[at]]) is not None:
                self._num_followed[went_on] += 1
                ends[hashes[at]] = None
        ends[hashes[-1]] = goes_on
        ends.move_to_end(hashes[-1])
        if len(ends) > MEMORY:
            ends.popitem(last=False)
        self._num[goes_on] += 1
        if sum(self._num) > MEMORY:
            self._num = [number / 2 for number in self._num]
            self._num_followed = [number / 2 for number in self._num_followed]
        return goes_on and self._are_followed_more()

    def _are_followed_more(self) -> bool:
        """True if prompts that went on were followed more often than others."""
        (others, went_on), (others_followed, followed) = self._num, self._num_followed
        return went_on >= ENOUGH and followed * others >= FOLLOWED_MORE * others_followed * went_on
