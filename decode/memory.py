"""Judges how many blocks decoding sequences may take, and how many they will need soon."""

from collections.abc import Callable, Iterable

from engine.worker.blocks import BlockPool
from engine.worker.sequence import Sequence


class DecodeMemory:
    """Judges the room in the pool. `growth_tokens` is the growth to reserve for each sequence."""

    def __init__(self, pool: BlockPool, *, block_size: int, growth_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.growth_tokens = growth_tokens

    def blocks_of(self, num_tokens: int) -> int:
        """Returns how many blocks `num_tokens` need."""
        return -(-num_tokens // self.block_size)

    def soon_blocks(self, seq: Sequence) -> int:
        """Returns the blocks that a sequence lacks for its tokens and the next `growth_tokens`."""
        length = min(seq.limits.max_len, len(seq.token_ids) + self.growth_tokens)
        return max(self.blocks_of(length) - len(seq.block_table), 0)

    def has_room(
        self, candidate: Sequence, *, num_admitted: int, admitted: Callable[[], Iterable[Sequence]]
    ) -> bool:
        """True if the candidate's prompt fits, and the growth of all admitted sequences with it.

        If nothing else is admitted, the prompt alone counts. `admitted` is called only if the
        answer is not plain from the number.
        """
        if not num_admitted:
            return candidate.num_blocks - len(candidate.block_table) <= self.pool.num_idle
        # A sequence lacks at most its growth, a block begun before, and one not yet given to it.
        most = self.growth_tokens // self.block_size + 2
        if self.soon_blocks(candidate) + num_admitted * most <= self.pool.num_idle:
            return True
        num_soon = sum(map(self.soon_blocks, (candidate, *admitted())))
        return num_soon <= self.pool.num_idle

    def take_for_draft(
        self, seq: Sequence, num_tokens: int, admitted: Callable[[], Iterable[Sequence]]
    ) -> int:
        """Takes blocks for drafted tokens; returns for how many tokens there is room.

        Blocks that other sequences may need soon stay idle.
        """
        length = len(seq.token_ids)
        num_missing = self.blocks_of(length + num_tokens) - len(seq.block_table)
        if num_missing > 0:
            others = sum(map(self.soon_blocks, admitted())) - self.soon_blocks(seq)
            num_blocks = min(num_missing, self.pool.num_idle, self.pool.num_idle - others)
            seq.block_table += self.pool.allocate(max(num_blocks, 0))
        return min(num_tokens, len(seq.block_table) * self.block_size - length)
