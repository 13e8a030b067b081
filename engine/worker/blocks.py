"""The pool of KV blocks: it tracks the holders of each block. Integers and hashes only, no KV.

Each block can have three independent kinds of holders. The block becomes free when its last holder
releases it:

    owned      sequences whose block table names it (several, if they share a prefix)
    leased     open leases on it: another worker may read it
    in flight  pulls that write into it; or a step that may still write, after its owner released it

A block without a holder is free. If it is full and its hash is known, it is also *cached*. It keeps
its content until the free list, least recently used first, reaches it. *Evict-first* blocks are
allocated before other cached blocks: another worker has a copy of them, as their last sequence or
lease has stated. A block that precedes a kept block is not evicted first, or the prefix would be
lost. Generated blocks do not count here: the next prompt repeats the answer, or cannot use it.
*Likely-reused* blocks were marked by the last sequence's request. They stay cached for
`LIKELY_REUSED_STAY` times as many allocations as other blocks. At all times

    num_blocks = free + cached + owned + leased + in flight        (each block counted once)

A block's hash covers its tokens and all tokens before it, so equal hashes mean equal prefixes. The
hash is keyed by a salt of 32 secret bytes, one for each tenant. So tenants find only their own
prefixes, and a reader of hashes cannot find the tokens by trying. The key comes first in the hashed
bytes. So BLAKE2b is a pseudo-random function here, and needs no second compression for 16 tokens.
Simulations have no secrets, and no salt.

A launched step may write to the blocks of a sequence that has ended since. So while a step is in
flight, a block without a holder and without a hash stays *in flight*, until the last step launched
so far has ended. A block with a hash is full, so no step writes to it.

If a reader wants events, the pool records each stored and each evicted block.

Sources: BLAKE2 keyed by prefix, Luykx, Mennink and Neves, ToSC 2016; two owners of a transferred
block, sglang#24527 and TensorRT-LLM#12542; chained block hashes, vLLM's prefix cache.
"""

import sys
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from heapq import merge
from itertools import chain, islice, repeat
from operator import mul
from typing import NamedTuple, NewType

import msgspec

from engine.errors import OutOfBlocks
from engine.messages import HASH_BYTES

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

LIKELY_REUSED_STAY = 3
ORDINARY, EVICT_FIRST, LIKELY_REUSED = range(3)  # marks of blocks
OWNED, LEASED, IN_FLIGHT = range(3)  # kinds of holders


def hash_block(parent: BlockHash | None, token_ids: Sequence[int], salt: bytes = b"") -> BlockHash:
    """Returns the hash of a full block, computed from its tokens and the previous block's hash."""
    return hash_blocks(token_ids, len(token_ids), salt, parent=parent)[0]


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    salt: bytes = b"",
    *,
    parent: BlockHash | None = None,
) -> list[BlockHash]:
    """Returns the hashes of the full blocks of `token_ids`. The first block follows `parent`.

    A partial block at the end has no hash. All salts in use have the same length.
    """
    hashes: list[BlockHash] = []
    salted = blake2b(salt, digest_size=HASH_BYTES)
    last: bytes = parent or b""
    numbers = array("I", token_ids)  # four bytes for each id, little-endian
    if sys.byteorder == "big":
        numbers.byteswap()
    packed = numbers.tobytes()
    width = 4 * block_size
    for start in range(0, len(packed) - width + 1, width):
        h = salted.copy()
        h.update(last + packed[start : start + width])
        last = h.digest()
        hashes.append(BlockHash(last))
    return hashes


class BlockCounts(msgspec.Struct, frozen=True):
    """Counts of a pool's blocks. A block with several kinds of holders is counted in the last
    matching field.
    """

    free: int
    cached: int
    owned: int
    leased: int
    in_flight: int

    @property
    def total(self) -> int:
        """Returns the number of all blocks in the pool."""
        return self.free + self.cached + self.owned + self.leased + self.in_flight


class Stored(NamedTuple):
    """A block can now be found by its hash. In its prompt, the block follows `parent`."""

    block_hash: BlockHash
    parent: BlockHash | None
    token_ids: Sequence[int] = ()  # the block's tokens, if known
    medium: str | None = None  # medium of a store's block; None: a worker's pool


class Evicted(NamedTuple):
    """A block can no longer be found by its hash."""

    block_hash: BlockHash
    medium: str | None = None  # the medium from which the block was removed


CacheEvent = Stored | Evicted
# The same as the constructors, in half the time.
_stored, _evicted = partial(tuple.__new__, Stored), partial(tuple.__new__, Evicted)


class BlockPool:
    """Allocates block ids, and finds the blocks of prefixes by their hashes. Owned by one thread.

    With `keeps_events` it records stored and evicted blocks until `pop_events`. Without
    `with_tokens` the events do not include the blocks' tokens.
    """

    def __init__(
        self, num_blocks: int, *, keeps_events: bool = False, with_tokens: bool = True
    ) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        # True if callers should pass tokens to `set_hashes`.
        self.wants_tokens = keeps_events and with_tokens
        self._events: list[CacheEvent] | None = [] if keeps_events else None
        # For each kind of holder: the number of holders of each block, then of blocks with any.
        self._holders = tuple([0] * num_blocks for _ in (OWNED, LEASED, IN_FLIGHT))
        self._num_held = [0, 0, 0]
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        # For each block: the number of known prompt blocks that directly follow it.
        self._num_children: dict[BlockHash, int] = {}
        # The hash of each block's parent, set for blocks of prompts.
        self._parent: list[BlockHash | None] = [None] * num_blocks
        self._num_cached = 0  # number of idle blocks with a known hash
        # For each step in flight: the blocks that become free when the step ends.
        self._freed_in_flight: deque[list[BlockId]] = deque()
        # Blocks without a holder, in the order of allocation. An ordered dict, not a deque, because
        # a prefix hit removes a block from the middle. First are the blocks without a hash and the
        # evict-first blocks. Only when none of them is left, blocks worth keeping are allocated.
        self._evict_first: OrderedDict[BlockId, None] = OrderedDict(
            (BlockId(i), None) for i in range(num_blocks)
        )
        self._kept: OrderedDict[BlockId, None] = OrderedDict()
        self._likely_reused: OrderedDict[BlockId, None] = OrderedDict()
        self._marks = bytearray(num_blocks)  # each block's mark, used after its last release
        self._num_handed_out = 0  # number of allocations so far
        # `_num_handed_out` at the time when a cached block lost its last holder.
        self._idle_since = [0] * num_blocks

    @property
    def num_idle(self) -> int:
        """Returns the number of blocks that `allocate` can use: free blocks, with the cached
        ones.
        """
        return len(self._evict_first) + len(self._kept) + len(self._likely_reused)

    def counts(self) -> BlockCounts:
        """Returns the number of blocks for each kind of holder."""
        _, leased, in_flight = self._num_held
        if in_flight and leased:  # a block may be both leased and in flight
            leased -= sum(map(bool, map(mul, self._holders[IN_FLIGHT], self._holders[LEASED])))
        in_flight += sum(map(len, self._freed_in_flight))
        owned = self.num_blocks - self.num_idle - leased - in_flight
        cached = self._num_cached
        return BlockCounts(
            free=self.num_idle - cached,
            cached=cached,
            owned=owned,
            leased=leased,
            in_flight=in_flight,
        )

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Returns the pool's blocks for the longest known prefix of `hashes`. Acquires none of
        them.
        """
        found: list[BlockId] = []
        for h in hashes:
            block = self._by_hash.get(h)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, hashes: Iterable[BlockHash]) -> list[tuple[int, BlockId]]:
        """Returns the blocks of `hashes` that are in the pool, each with the index of its hash."""
        found = ((place, self._by_hash.get(h)) for place, h in enumerate(hashes))
        return [(place, block) for place, block in found if block is not None]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Allocates `num_blocks` blocks for a sequence. Evicts cached blocks if necessary. Raises
        OutOfBlocks.
        """
        if num_blocks > self.num_idle:
            raise OutOfBlocks(num_blocks, self.num_idle)
        known, first, kept = self._hash, self._evict_first, self._kept
        marks, likely_reused = self._marks, self._likely_reused
        idle = chain(first, self._longest_idle() if likely_reused else kept)
        blocks, num_first = list(islice(idle, num_blocks)), len(first)
        for block in blocks[:num_first]:
            del first[block]
        for block in blocks[num_first:]:
            del (likely_reused if marks[block] == LIKELY_REUSED else kept)[block]
        self._num_handed_out += num_blocks
        self._num_held[OWNED] += num_blocks
        owned, evicted = self._holders[OWNED], []
        for block in blocks:
            owned[block] = 1
            if known[block] is not None:
                evicted.append(block)
        if evicted:
            self._num_cached -= len(evicted)
            self._remove(evicted)
        return blocks

    def _longest_idle(self) -> Iterable[BlockId]:
        """Returns the idle blocks that are worth keeping, in the order in which they will be
        evicted.
        """
        now, since, marks = self._num_handed_out, self._idle_since, self._marks

        def stay(block: BlockId) -> int:
            age = since[block] - now
            return age if marks[block] == LIKELY_REUSED else LIKELY_REUSED_STAY * age

        return merge(self._kept, self._likely_reused, key=stay)

    def set_hashes(
        self,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None = None,
        token_ids: Sequence[Sequence[int]] = (),
        is_answer: bool = False,
    ) -> None:
        """Records that `blocks`, each of which follows the block before it, are full, with their
        hashes.

        If two blocks have the same hash, lookups return the first.

        `parent` is the hash of the block before the first. The blocks' tokens are only used in
        events. With `is_answer`, the blocks were generated, and no block counts as a block that
        follows its parent.
        """
        by_hash, known, owned, events = (
            self._by_hash,
            self._hash,
            self._holders[OWNED],
            self._events,
        )
        num_children = self._num_children
        for block, block_hash, tokens in zip(blocks, hashes, token_ids or repeat(()), strict=False):
            if block_hash not in by_hash:
                by_hash[block_hash] = block
                known[block] = block_hash
                if not owned[block]:  # most blocks have an owner, and so are not idle
                    self._num_cached += self._is_idle(block)
                if not is_answer:
                    self._parent[block] = parent
                    if parent is not None:
                        num_children[parent] = num_children.get(parent, 0) + 1
                if events is not None:
                    events.append(_stored((block_hash, parent, tokens, None)))
            parent = block_hash

    def pop_events(self) -> list[CacheEvent]:
        """Returns the blocks that were stored and evicted since the last call, in order."""
        events = self._events
        if not events:
            return []
        self._events = []
        return events

    def hold(self, kind: int, blocks: Iterable[BlockId]) -> None:
        """Adds a holder to each block: a sequence that owns it, a lease, or a pull that writes."""
        num_first, holders = 0, self._holders[kind]
        first, kept, known = self._evict_first, self._kept, self._hash
        likely_reused = self._likely_reused
        for block in blocks:
            num_first += not holders[block]
            holders[block] += 1
            if block in kept:
                del kept[block]
                self._num_cached -= 1
            elif block in likely_reused:
                del likely_reused[block]
                self._num_cached -= 1
            elif block in first:
                del first[block]
                self._num_cached -= known[block] is not None
        self._num_held[kind] += num_first

    def release(self, kind: int, blocks: Sequence[BlockId], mark: int | None = None) -> None:
        """Removes a holder from each block. Marks the blocks, unless `mark` is None.

        The last blocks of a prefix become free before its first blocks.
        """
        marks = self._marks
        if mark == EVICT_FIRST:
            self._mark_evict_first(blocks)
        elif mark is not None:
            for block in blocks:
                marks[block] = mark
        num_last, holders, (owned, leased, in_flight) = 0, self._holders[kind], self._holders
        first, queues = self._evict_first, (self._kept, self._evict_first, self._likely_reused)
        since, now = self._idle_since, self._num_handed_out
        known, freed, num_cached = self._hash, self._freed_in_flight, self._num_cached
        for block in reversed(blocks):
            count = holders[block] - 1
            assert count >= 0, f"block {block} is released more often than it was held"
            holders[block] = count
            if count:
                continue
            num_last += 1
            if not (owned[block] or leased[block] or in_flight[block]):
                if known[block] is not None:
                    queues[marks[block]][block] = None
                    since[block] = now
                    num_cached += 1
                elif freed:
                    freed[-1].append(block)
                else:
                    first[block] = None
                    first.move_to_end(block, last=False)
        self._num_cached = num_cached
        self._num_held[kind] -= num_last

    @property
    def num_steps(self) -> int:
        """Returns the number of launched steps that have not ended."""
        return len(self._freed_in_flight)

    def begin_step(self) -> None:
        """Records the launch of a step, which may write to the blocks of sequences."""
        self._freed_in_flight.append([])

    def end_step(self) -> None:
        """Records that the oldest launched step has ended, and frees the blocks that waited for
        it.
        """
        for block in self._freed_in_flight.popleft():
            self._evict_first[block] = None
            self._evict_first.move_to_end(block, last=False)

    def validate(self) -> None:
        """Asserts every invariant of the pool."""
        counts = self.counts()
        holders = list(zip(*reversed(self._holders), strict=True))
        freed = [block for blocks in self._freed_in_flight for block in blocks]
        assert len(set(freed)) == len(freed)
        assert not any(map(self._is_idle, freed))
        assert counts.in_flight == sum(flight > 0 for flight, _, _ in holders) + len(freed)
        assert self._num_held == [sum(map(bool, held)) for held in self._holders]
        assert counts.leased == sum(lease > 0 and not flight for flight, lease, _ in holders)
        assert counts.owned == sum(
            own > 0 and not (flight or lease) for flight, lease, own in holders
        )
        idle = [*self._evict_first, *self._kept, *self._likely_reused]
        assert len(set(idle)) == len(idle)
        assert counts.cached == sum(self._hash[block] is not None for block in idle)
        assert all(self._marks[block] == ORDINARY for block in self._kept)
        assert all(self._marks[block] == LIKELY_REUSED for block in self._likely_reused)
        for blocks in (self._kept, self._likely_reused):
            since = [self._idle_since[block] for block in blocks]
            assert since == sorted(since)
        assert counts.total == self.num_blocks
        for block in range(self.num_blocks):
            assert min(holders[block]) >= 0
            is_idle = self._is_idle(BlockId(block))
            assert (sum(holders[block]) == 0) == (is_idle or block in freed), (
                f"block {block} is misplaced"
            )
        for block_hash, held in self._by_hash.items():
            assert self._hash[held] == block_hash
        assert sum(h is not None for h in self._hash) == len(self._by_hash)
        assert Counter(each for each in self._parent if each is not None) == self._num_children

    def _is_idle(self, block: BlockId) -> bool:
        return block in self._kept or block in self._evict_first or block in self._likely_reused

    def _mark_evict_first(self, blocks: Sequence[BlockId]) -> None:
        """Marks the blocks of a prefix to be evicted before others.

        A block that another prompt block follows is not marked, nor are the blocks before it.
        """
        num_after = 0  # known blocks of this prefix that directly follow the block
        for block in reversed(blocks):
            block_hash = self._hash[block]
            if block_hash is None:
                continue
            if self._num_children.get(block_hash, 0) > num_after:
                break
            self._marks[block], num_after = EVICT_FIRST, 1

    def _remove(self, blocks: Iterable[BlockId]) -> None:
        """Removes the hashes and the parents of blocks."""
        by_hash, known, events = self._by_hash, self._hash, self._events
        num_children, parent_of = self._num_children, self._parent
        for block in blocks:
            block_hash = known[block]
            assert block_hash is not None
            del by_hash[block_hash]
            known[block] = None
            parent = parent_of[block]
            if parent is not None:
                parent_of[block] = None
                left = num_children[parent] - 1
                if left:
                    num_children[parent] = left
                else:
                    del num_children[parent]
            if events is not None:
                events.append(_evicted((block_hash, None)))
