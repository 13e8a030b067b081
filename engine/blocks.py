"""Who owns which KV block. Integers and hashes only: the bytes live in the runner's buffer.

Each block has three independent holders, and returns to the free list when the last lets go:

    owned      sequences whose block table names it (several, when a prefix is shared)
    leased     open leases on it: another worker may read it
    in flight  pulls that write into it

A block with no holder is free. If it is full and its hash is known it is also *cached*: it keeps
its content until the free list, least recently used first, comes round to it. So at all times

    num_blocks = free + cached + owned + leased + in flight        (each block counted once)

A block's hash covers its tokens and all tokens before it, so equal hashes mean equal prefixes; a
salt keeps the prefixes of tenants apart.

Sources: two owners of a transferred block, sglang#24527 and TensorRT-LLM#12542; chained block
hashes, vLLM's prefix cache.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NewType

import numpy as np

from engine.errors import OutOfBlocks

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def hash_block(parent: BlockHash | None, token_ids: Sequence[int], salt: bytes = b"") -> BlockHash:
    """Hash of one full block, given its predecessor's; `salt` has at most 64 bytes."""
    h = blake2b(parent or b"", digest_size=HASH_BYTES, key=salt)
    h.update(np.asarray(token_ids, dtype="<u4").tobytes())
    return BlockHash(h.digest())


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`; a last, partial block has none."""
    hashes: list[BlockHash] = []
    parent: BlockHash | None = None
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end], salt)
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Every block of a pool, counted once. A block held in two ways counts as the later field."""

    free: int
    cached: int
    owned: int
    leased: int
    in_flight: int

    @property
    def total(self) -> int:
        """All blocks of the pool."""
        return self.free + self.cached + self.owned + self.leased + self.in_flight


class BlockPool:
    """Hands out block ids and remembers which hold which prefix. Owned by one thread."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._owned = [0] * num_blocks
        self._leased = [0] * num_blocks
        self._in_flight = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        # Blocks with no holder, next to be handed out first. An ordered dict, not a deque, because
        # a prefix hit takes a block out of the middle.
        self._idle: OrderedDict[BlockId, None] = OrderedDict(
            (BlockId(i), None) for i in range(num_blocks)
        )

    @property
    def num_idle(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._idle)

    def counts(self) -> BlockCounts:
        """Where every block is now."""
        in_flight = leased = owned = 0
        for own, lease, flight in zip(self._owned, self._leased, self._in_flight, strict=True):
            if flight:
                in_flight += 1
            elif lease:
                leased += 1
            elif own:
                owned += 1
        cached = sum(self._hash[b] is not None for b in self._idle)
        return BlockCounts(
            free=len(self._idle) - cached,
            cached=cached,
            owned=owned,
            leased=leased,
            in_flight=in_flight,
        )

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Blocks of the longest prefix of `hashes` that is here. They are not acquired."""
        found: list[BlockId] = []
        for h in hashes:
            block = self._by_hash.get(h)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Takes that many blocks for a sequence, evicting cached ones. Raises OutOfBlocks."""
        if num_blocks > len(self._idle):
            raise OutOfBlocks(num_blocks, len(self._idle))
        blocks = [self._idle.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            self._owned[block] = 1
        return blocks

    def set_hash(self, block: BlockId, block_hash: BlockHash) -> None:
        """Says that `block` is full and what it holds. Of two equal blocks the first is found."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hash[block] = block_hash

    def own(self, blocks: Iterable[BlockId]) -> None:
        """One more sequence uses these blocks."""
        self._hold(self._owned, blocks)

    def disown(self, blocks: Sequence[BlockId]) -> None:
        """A sequence lets go. The end of a prefix becomes free before its beginning."""
        self._let_go(self._owned, reversed(blocks))

    def lease(self, blocks: Iterable[BlockId]) -> None:
        """Another worker may read these blocks from now on."""
        self._hold(self._leased, blocks)

    def end_lease(self, blocks: Sequence[BlockId]) -> None:
        """No reader is left under that lease."""
        self._let_go(self._leased, reversed(blocks))

    def begin_write(self, blocks: Iterable[BlockId]) -> None:
        """A pull will write into these blocks."""
        self._hold(self._in_flight, blocks)

    def end_write(self, blocks: Sequence[BlockId]) -> None:
        """The pull will not touch these blocks again."""
        self._let_go(self._in_flight, reversed(blocks))

    def validate(self) -> None:
        """Asserts every invariant of the pool."""
        assert self.counts().total == self.num_blocks
        for block in range(self.num_blocks):
            holders = self._owned[block] + self._leased[block] + self._in_flight[block]
            assert min(self._owned[block], self._leased[block], self._in_flight[block]) >= 0
            assert (holders == 0) == (BlockId(block) in self._idle), f"block {block} is misplaced"
        for block_hash, held in self._by_hash.items():
            assert self._hash[held] == block_hash
        assert sum(h is not None for h in self._hash) == len(self._by_hash)

    def _hold(self, holders: list[int], blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            holders[block] += 1
            self._idle.pop(block, None)

    def _let_go(self, holders: list[int], blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            assert holders[block] > 0, f"block {block} is let go more often than it was held"
            holders[block] -= 1
            if not (self._owned[block] or self._leased[block] or self._in_flight[block]):
                self._idle[block] = None
                if self._hash[block] is None:
                    self._idle.move_to_end(block, last=False)

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hash[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash[block] = None
