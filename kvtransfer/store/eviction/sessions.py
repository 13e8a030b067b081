"""Sessions from clients' hints, and the trust in each API key. Pure.

Hints are unverified claims. So the number of sessions, of blocks kept by hints, and of pinned
blocks is bounded for each key. A hint beyond a bound is ignored. A `keep_s` promises that a session
returns. If most promised returns of a key do not happen, its `keep_s` values are ignored until its
record is better.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.worker.blocks import BlockHash

LONGEST_CHAIN = 1 << 16  # most blocks of one hint; further blocks are ignored
MOST_LATE = 4.0  # a return within this multiple of `keep_s` keeps the promise
TRUST = 8.0  # number of kept promises with which a new key's record starts
RECORD = 512.0  # number of promises after which older promises weigh less

Chain = tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class HintBudget:
    """The bounds on hints: for one key, and for all keys together."""

    kept_blocks: int
    pinned_blocks: int
    # most pinned blocks of all keys together: the rest of the tier can always be evicted
    all_pinned_blocks: int
    num_sessions: int = 4096
    num_keys: int = 1024

    @staticmethod
    def of_tier(num_blocks: int) -> "HintBudget":
        """Returns a key's budget: a quarter of the tier for sessions, and a sixteenth for pins."""
        return HintBudget(num_blocks // 4, num_blocks // 16, num_blocks // 4)


@dataclass(slots=True)
class LiveSession:
    """A session that has not ended, and the blocks of its last prompt."""

    key: str
    blocks: Chain
    keep_s: float | None
    used_s: float


@dataclass(slots=True)
class HintRecord:
    """The sessions, pins and kept promises of one key."""

    sessions: OrderedDict[str, LiveSession] = field(default_factory=OrderedDict)
    pinned: dict[BlockHash, None] = field(default_factory=dict)
    num_kept: int = 0  # number of blocks in the tier that this key's hints keep
    num_right: float = TRUST  # number of kept promises, with recent ones weighing more
    num_wrong: float = 0.0

    @property
    def is_believed(self) -> bool:
        """True while most promised returns happen in time."""
        return self.num_right >= self.num_wrong

    def judge(self, session: LiveSession, now_s: float, *, returned: bool) -> None:
        """Records whether the session kept its promise."""
        if session.keep_s is None:
            return
        in_time = now_s - session.used_s <= MOST_LATE * session.keep_s
        if returned and in_time:
            self.num_right += 1
        elif not in_time:
            self.num_wrong += 1
        total = self.num_right + self.num_wrong
        if total > RECORD:
            self.num_right *= RECORD / total
            self.num_wrong *= RECORD / total


class Sessions:
    """The live sessions of all keys, and the blocks that keys have pinned."""

    def __init__(self, budget: HintBudget) -> None:
        self.budget = budget
        self.keys: dict[str, HintRecord] = {}
        # number of live sessions that have each block
        self._num_sessions: Counter[BlockHash] = Counter()
        self._num_pins: Counter[BlockHash] = Counter()  # number of keys that pin each block

    def record(self, key: str) -> HintRecord | None:
        """Returns the record of a key; None if there is no room for one more key."""
        found = self.keys.get(key)
        if found is None and len(self.keys) >= self.budget.num_keys:
            idle = (k for k, r in self.keys.items() if not (r.sessions or r.pinned or r.num_kept))
            dropped = next(idle, None)
            if dropped is None:
                return None
            del self.keys[dropped]
        if found is None:
            found = self.keys[key] = HintRecord()
        return found

    def is_shared(self, block: BlockHash) -> bool:
        """True if more than one live session has the block."""
        return self._num_sessions[block] > 1

    def is_live(self, block: BlockHash) -> bool:
        """True if a live session has the block."""
        return block in self._num_sessions

    def is_pinned(self, block: BlockHash) -> bool:
        """True if a key pins the block."""
        return block in self._num_pins

    def begin_turn(
        self, record: HintRecord, name: str, session: LiveSession
    ) -> tuple[Chain, Chain]:
        """Records a turn of a session, which replaces its previous turn.

        Returns the previous turn's blocks, and the blocks of a session that was dropped because the
        key has too many sessions.
        """
        before = record.sessions.pop(name, None)
        if before is not None:
            record.judge(before, session.used_s, returned=True)
        record.sessions[name] = session
        for block in session.blocks:
            self._num_sessions[block] += 1
        if before is not None:
            self._let_go(before)
        dropped: Chain = ()
        if len(record.sessions) > self.budget.num_sessions:
            _, oldest = record.sessions.popitem(last=False)
            record.judge(oldest, session.used_s, returned=False)
            self._let_go(oldest)
            dropped = oldest.blocks
        return (() if before is None else before.blocks), dropped

    def end(self, key: str, name: str, now_s: float) -> LiveSession | None:
        """Ends a session. Returns the session, or None if it is unknown."""
        record = self.keys.get(key)
        session = None if record is None else record.sessions.pop(name, None)
        if session is not None and record is not None:
            record.judge(session, now_s, returned=False)
            self._let_go(session)
        return session

    def pin(self, key: str, blocks: Chain) -> None:
        """Pins these blocks, first block first, as far as the key's budget allows."""
        record = self.record(key)
        if record is None:
            return
        for block in blocks:
            if len(record.pinned) >= self.budget.pinned_blocks:
                break
            is_new = block not in self._num_pins
            if is_new and len(self._num_pins) >= self.budget.all_pinned_blocks:
                break
            if block not in record.pinned:
                record.pinned[block] = None
                self._num_pins[block] += 1

    def unpin(self, key: str, blocks: Chain) -> None:
        """Removes the key's own pins of these blocks."""
        record = self.keys.get(key)
        for block in blocks if record is not None else ():
            if record is not None and block in record.pinned:
                del record.pinned[block]
                _decrease(self._num_pins, block)

    def all_live(self) -> Iterator[LiveSession]:
        """Yields the live sessions of all keys."""
        for record in self.keys.values():
            yield from record.sessions.values()

    def validate(self) -> None:
        """Asserts that counts are correct and within their bounds."""
        assert len(self.keys) <= self.budget.num_keys
        live = Counter(block for session in self.all_live() for block in session.blocks)
        assert live == self._num_sessions
        assert len(self._num_pins) <= self.budget.all_pinned_blocks
        assert Counter(b for r in self.keys.values() for b in r.pinned) == self._num_pins
        for record in self.keys.values():
            assert len(record.sessions) <= self.budget.num_sessions
            assert len(record.pinned) <= self.budget.pinned_blocks
            assert 0 <= record.num_kept <= self.budget.kept_blocks

    def _let_go(self, session: LiveSession) -> None:
        for block in session.blocks:
            _decrease(self._num_sessions, block)


def _decrease(counts: Counter[BlockHash], block: BlockHash) -> None:
    counts[block] -= 1
    if not counts[block]:
        del counts[block]
