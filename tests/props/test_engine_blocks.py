"""BlockPool against a slow twin, which has one record per block and plain lists of idle blocks."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import OutOfBlocks
from engine.worker.blocks import (
    EVICT_FIRST,
    IN_FLIGHT,
    LEASED,
    LIKELY_REUSED,
    LIKELY_REUSED_STAY,
    ORDINARY,
    OWNED,
    BlockCounts,
    BlockHash,
    BlockPool,
    hash_block,
    hash_blocks,
)

NUM_BLOCKS = 6
# only a few hashes, so that blocks often have equal ones
HASHES = [BlockHash(bytes([i])) for i in range(4)]
MARKS = ("ordinary", "spare", "recurring")
# the state of a block with two kinds of holders is the later kind in this list
KINDS = ("owned", "leased", "in_flight")
KIND_OF = {"owned": OWNED, "leased": LEASED, "in_flight": IN_FLIGHT}
MARK_OF = {"ordinary": ORDINARY, "spare": EVICT_FIRST, "recurring": LIKELY_REUSED}


@dataclass
class Block:
    """The twin's record of one block."""

    holds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    content: BlockHash | None = None  # the hash under which a match finds the block
    mark: str = "ordinary"
    idle_since: int = 0  # value of `num_handed_out` when the cached block lost its last holder

    @property
    def is_idle(self) -> bool:
        return not any(self.holds.values())


class PoolAndItsTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.twin = [Block() for _ in range(NUM_BLOCKS)]
        # blocks without content; the first is handed out first
        self.spare = list(range(NUM_BLOCKS))
        # idle blocks with content, in the order of becoming idle; handed out after `spare`
        self.kept: list[int] = []
        self.num_handed_out = 0

    @property
    def idle(self) -> list[int]:
        return [*self.spare, *sorted(self.kept, key=self._stay)]

    def _stay(self, block):
        """Returns the eviction key: age first; at equal age, ordinary blocks before likely reused
        ones.
        """
        age = self.num_handed_out - self.twin[block].idle_since
        recurs = self.twin[block].mark == "recurring"
        return -age * (1 if recurs else LIKELY_REUSED_STAY), recurs

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks):
        if num_blocks > len(self.idle):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(num_blocks)
            return
        expected = self.idle[:num_blocks]
        self._take(expected)
        assert self.pool.allocate(num_blocks) == expected
        self.num_handed_out += num_blocks
        for block in expected:
            self.twin[block].content = None
            self.twin[block].holds["owned"] = 1

    @precondition(lambda self: any(not b.is_idle and b.content is None for b in self.twin))
    @rule(data=st.data(), content=st.sampled_from(HASHES))
    def fill(self, data, content):
        blank = [i for i, b in enumerate(self.twin) if not b.is_idle and b.content is None]
        block = data.draw(st.sampled_from(blank))
        self.pool.set_hashes([block], [content])
        if all(b.content != content for b in self.twin):
            self.twin[block].content = content

    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def hold(self, data, kind):
        """Adds a holder to blocks that already have a holder."""
        held = [i for i, b in enumerate(self.twin) if not b.is_idle]
        self._hold(kind, data.draw(st.lists(st.sampled_from(held), unique=True)) if held else [])

    @precondition(lambda self: any(self.twin[block].content for block in self.idle))
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def hold_cached(self, data, kind):
        """Adds a holder to idle blocks that a match found."""
        cached = [block for block in self.idle if self.twin[block].content]
        self._hold(kind, data.draw(st.lists(st.sampled_from(cached), min_size=1, unique=True)))

    def _hold(self, kind, blocks):
        self.pool.hold(KIND_OF[kind], blocks)
        for block in blocks:
            self.twin[block].holds[kind] += 1
        self._take(blocks)

    def _take(self, blocks):
        self.spare = [block for block in self.spare if block not in blocks]
        self.kept = [block for block in self.kept if block not in blocks]

    @rule(data=st.data(), kind=st.sampled_from(KINDS), mark=st.sampled_from(MARKS))
    def let_go(self, data, kind, mark):
        held = [i for i, b in enumerate(self.twin) if b.holds[kind]]
        blocks = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        if kind == "in_flight":
            self.pool.release(IN_FLIGHT, blocks)
        else:
            is_marked = kind == "owned" or mark == "spare"
            self.pool.release(KIND_OF[kind], blocks, MARK_OF[mark] if is_marked else None)
            self._mark(blocks, kind, mark)
        for block in reversed(blocks):
            twin = self.twin[block]
            twin.holds[kind] -= 1
            if not twin.is_idle:
                continue
            if not twin.content:
                self.spare.insert(0, block)
            else:
                (self.spare if twin.mark == "spare" else self.kept).append(block)
                twin.idle_since = self.num_handed_out

    def _mark(self, blocks, kind, mark):
        for block in blocks:
            if kind == "owned" if mark != "spare" else self.twin[block].content:
                self.twin[block].mark = mark

    @rule(wanted=st.lists(st.sampled_from(HASHES), unique=True))
    def match(self, wanted):
        by_content = {b.content: i for i, b in enumerate(self.twin) if b.content is not None}
        expected = []
        for content in wanted:
            if content not in by_content:
                break
            expected.append(by_content[content])
        assert self.pool.match(wanted) == expected

    @invariant()
    def the_pool_is_sound(self):
        self.pool.validate()

    @invariant()
    def both_count_the_same(self):
        states = ["cached" if b.content else "free" for b in self.twin]
        for i, block in enumerate(self.twin):
            states[i] = next((k for k in reversed(KINDS) if block.holds[k]), states[i])
        expected = {name: states.count(name) for name in ("free", "cached", *KINDS)}
        assert self.pool.counts() == BlockCounts(**expected)
        assert self.pool.counts().total == NUM_BLOCKS
        assert self.pool.num_idle == len(self.idle)

    def teardown(self) -> None:
        """Asserts that every idle block can be handed out, in the order that the twin predicts."""
        assert self.pool.allocate(len(self.idle)) == self.idle


TestPoolAndItsTwin = PoolAndItsTwin.TestCase
TestPoolAndItsTwin.settings = settings(max_examples=100, stateful_step_count=30)

tokens = st.lists(st.integers(0, 2), max_size=12)
block_sizes = st.integers(1, 4)
salts = st.sampled_from([b"", b"a", b"b"])


@given(tokens, tokens, block_sizes, salts, salts)
def test_hashes_are_equal_exactly_as_far_as_prefix_and_salt(ours, theirs, block_size, salt, other):
    pairs = zip(
        hash_blocks(ours, block_size, salt), hash_blocks(theirs, block_size, other), strict=False
    )
    for i, (our_hash, their_hash) in enumerate(pairs, start=1):
        same = salt == other and ours[: i * block_size] == theirs[: i * block_size]
        assert (our_hash == their_hash) == same


@given(tokens, block_sizes, salts)
def test_hashing_block_by_block_is_hashing_all_at_once(token_ids, block_size, salt):
    parent = None
    for i, expected in enumerate(hash_blocks(token_ids, block_size, salt)):
        parent = hash_block(parent, token_ids[i * block_size : (i + 1) * block_size], salt)
        assert parent == expected
