"""Evicts the leaf with the fewest expected hits for its room. Learns when blocks are used again.

Each cached block is in a class, and each class has a queue of its blocks by last use:

    PLAIN + n     blocks without a client's hint, after n earlier turns
    SESSION + n   blocks of a live session, after n turns
    KEPT + k      blocks of a live session whose client expects to return within 2^(k/2) seconds
    ENDED         blocks that only ended sessions used; their worth is zero

`returns.ReturnTable` learns the worth of a block by class and age. The victim is the leaf of least
worth among the oldest and the newest leaf of every queue. With age, worth rises until returns are
most likely, and then falls. So the least worth is at one end of a queue. Evicting the newest block
means that it is not admitted.

Turns are counted without hints too. A new block starts with the uses of its parent as its turns. If
the parent has several continuations, like a system prompt, the block starts with none. The
histories of evicted blocks are kept for a while, so a block that returns gets its turns back.

A live session that returns in time raises the worth of its class, and an ended session leaves its
class. So the table also learns the worth of hints. `sessions` bounds what one key can gain by them.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.leaves import Forest, LeafQueue, LeafStack, rest
from kvtransfer.store.eviction.returns import ReturnTable
from kvtransfer.store.eviction.seam import (
    BlocksPinned,
    BlocksUnpinned,
    Link,
    MayGo,
    SessionEnded,
    SessionHint,
    SessionUsed,
)
from kvtransfer.store.eviction.sessions import LONGEST_CHAIN, HintBudget, LiveSession, Sessions

MOST_TURNS = 6
NUM_TURNS = MOST_TURNS + 1
NUM_KEPT = 34  # number of classes of `keep_s`, in half octaves up to a day
FANOUT = 2  # continuations within one conversation: the next turn, and the last partial block
LEAST_GHOSTS = 65_536
PLAIN, SESSION, KEPT = 0, NUM_TURNS, 2 * NUM_TURNS
ENDED = 2 * NUM_TURNS + NUM_KEPT
FAMILIES = (NUM_TURNS, NUM_TURNS, NUM_KEPT, 1)
UNITS_S = (*[1.0] * KEPT, *[2.0 ** (k / 2) / 8 for k in range(NUM_KEPT)], 1.0)
OLDEST, NEWEST = 0, 1  # the two ends of a queue; with equal worth, the oldest leaf is evicted
Offer = tuple[float, int, int, BlockHash]  # worth, end of its queue, class, and a leaf


@dataclass(slots=True)
class BlockFacts:
    """The access history of a block that is cached or was recently evicted."""

    used_s: float
    which: int = PLAIN  # class of the block
    num_uses: int = 1
    num_turns: int = 0
    num_continuations: int = 0
    owner: str | None = None  # API key whose hint put the block into its class


class LeafWorth:
    """Evicts the leaves of least worth first, in a tier of `num_blocks`. See `seam.Eviction`."""

    def __init__(self, num_blocks: int, budget: HintBudget | None = None) -> None:
        self._num_ghosts = num_blocks + LEAST_GHOSTS
        self._forest = Forest()
        self._facts: dict[BlockHash, BlockFacts] = {}
        # histories of evicted blocks, oldest first
        self._ghosts: OrderedDict[BlockHash, BlockFacts] = OrderedDict()
        self._queues = [LeafQueue(self._forest) for _ in UNITS_S]
        self._stacks = [LeafStack(self._forest) for _ in UNITS_S]
        self._table = ReturnTable(FAMILIES, UNITS_S)
        self._sessions = Sessions(budget or HintBudget.of_tier(num_blocks))
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._forest)

    def __contains__(self, block: object) -> bool:
        return block in self._forest

    def add(self, block: BlockHash, parent: BlockHash | None, now_s: float) -> None:
        """Adds a block, with its history if it was evicted recently."""
        if not self._forest.add(block, parent):
            return
        self._now_s = now_s
        before = None if parent is None else self._facts.get(parent)
        facts = self._ghosts.pop(block, None)
        if facts is None:
            facts = BlockFacts(now_s)
            if before is not None:
                before.num_continuations += 1
                facts.num_turns = _turns_after(before)
        else:
            self._table.returned(facts.which, facts.used_s, now_s)
            facts.num_uses += 1
            facts.used_s = now_s
            if before is not None:
                facts.num_turns = _turns_after(before)
        self._facts[block] = facts
        self._enter(block, facts, _plain(facts))

    def add_all(self, links: Iterable[Link], now_s: float) -> None:
        """Adds many blocks without a history, the least recently used first."""
        fresh = self._forest.add_all(list(links))
        self._now_s = now_s
        self._facts.update((block, BlockFacts(now_s)) for block in fresh)
        self._table.wait(PLAIN, now_s, len(fresh))
        self._queues[PLAIN].push_all(fresh)
        self._stacks[PLAIN].push_all(fresh)
        for block in self._ghosts.keys() & fresh:
            known = self._ghosts.pop(block)
            self._table.unwait(known.which, known.used_s)

    def use(self, blocks: Sequence[BlockHash], now_s: float) -> None:
        """Records a use of these blocks. All of them get the number of turns of the last block."""
        self._now_s = now_s
        found = [(block, self._facts[block]) for block in blocks if block in self._facts]
        if not found:
            return
        last = found[-1][1]
        num_turns = 0 if last.num_continuations > FANOUT else last.num_uses
        for block, facts in reversed(found):
            self._table.returned(facts.which, facts.used_s, now_s)
            self._leave_queue(block, facts)
            facts.used_s = now_s
            facts.num_uses += 1
            facts.num_turns = num_turns
            self._enter(block, facts, _plain(facts))

    def remove(self, block: BlockHash) -> None:
        """Removes a block. Its access history is kept for a while."""
        if block not in self._forest:
            return
        facts = self._facts.pop(block)
        self._leave_queue(block, facts)
        parent = self._forest.remove(block)
        if parent is not None:
            which = self._facts[parent].which
            self._queues[which].freed(parent)
            self._stacks[which].freed(parent)
        self._ghosts[block] = facts
        if len(self._ghosts) > self._num_ghosts:
            _, oldest = self._ghosts.popitem(last=False)
            self._table.given_up(oldest.which, oldest.used_s, self._now_s)

    def choose(self, num_blocks: int, may_go: MayGo) -> list[BlockHash]:
        """Removes and returns the leaves of least worth. Pinned blocks are never chosen."""
        is_pinned = self._sessions.is_pinned

        def may_leave(block: BlockHash) -> bool:
            return may_go(block) and not is_pinned(block)

        chosen: list[BlockHash] = []
        asked = [which for which, queue in enumerate(self._queues) if queue]
        offers: list[Offer] = []
        for which in asked if num_blocks > 0 else ():
            self._offer(offers, which, may_leave)
        while len(chosen) < num_blocks and offers:
            _, _, which, block = heappop(offers)
            # the queue's oldest leaf was also its newest, and is already removed
            if block not in self._facts:
                continue
            parent = self._forest.parents[block]
            self.remove(block)
            chosen.append(block)
            self._offer(offers, which, may_leave)
            if parent in self._facts and self._facts[parent].which != which:
                self._offer(offers, self._facts[parent].which, may_leave)
        for which in asked:
            self._queues[which].restore()
            self._stacks[which].restore()
        if len(chosen) < num_blocks and len(self._forest):
            others = rest(self._forest, num_blocks - len(chosen), may_leave)
            for block in others:
                self.remove(block)
                chosen.append(block)
        return chosen

    def hint(self, hint: SessionHint, now_s: float) -> None:
        """Applies a hint within the bounds on its key."""
        self._now_s = now_s
        match hint:
            case SessionUsed():
                self._use_session(hint, now_s)
            case SessionEnded(key, session):
                ended = self._sessions.end(key, session, now_s)
                if ended is not None:
                    self._release(ended.blocks, key, ENDED)
            case BlocksPinned(key, blocks):
                self._sessions.pin(key, blocks)
            case BlocksUnpinned(key, blocks):
                self._sessions.unpin(key, blocks)

    def validate(self) -> None:
        """Asserts that every block is in one queue, and that all counts are correct."""
        self._forest.validate()
        self._sessions.validate()
        assert self._facts.keys() == self._forest.parents.keys()
        assert self._ghosts.keys().isdisjoint(self._facts)
        assert len(self._ghosts) <= self._num_ghosts
        assert self._table.num_waiting == len(self._facts) + len(self._ghosts)
        for queue, stack in zip(self._queues, self._stacks, strict=True):
            queue.validate()
            stack.validate()
        assert sum(map(len, self._queues)) == len(self._facts)
        assert all(block in self._queues[facts.which] for block, facts in self._facts.items())
        for key, record in self._sessions.keys.items():
            assert record.num_kept == sum(f.owner == key for f in self._facts.values())

    def _offer(self, offers: list[Offer], which: int, may_go: MayGo) -> None:
        """Adds the oldest and the newest leaf of a queue to the heap of candidates for eviction."""
        ends = (self._queues[which].oldest(may_go), self._stacks[which].newest(may_go))
        for end, found in zip((OLDEST, NEWEST), ends, strict=True):
            if found is not None:
                age_s = self._now_s - self._facts[found].used_s
                worth = 0.0 if which == ENDED else self._table.worth(which, age_s)
                heappush(offers, (worth, end, which, found))

    def _enter(self, block: BlockHash, facts: BlockFacts, which: int) -> None:
        """Puts a block into the queue of a class. Its waiting time counts from its last use."""
        facts.which = which
        self._table.wait(which, facts.used_s)
        self._queues[which].push(block)
        self._stacks[which].push(block)

    def _leave_queue(self, block: BlockHash, facts: BlockFacts) -> None:
        self._queues[facts.which].discard(block)
        self._stacks[facts.which].discard(block)
        if facts.owner is not None:
            self._sessions.keys[facts.owner].num_kept -= 1
            facts.owner = None

    def _move(self, block: BlockHash, facts: BlockFacts, which: int) -> None:
        self._table.unwait(facts.which, facts.used_s)
        self._leave_queue(block, facts)
        self._enter(block, facts, which)

    def _use_session(self, hint: SessionUsed, now_s: float) -> None:
        record = self._sessions.record(hint.key)
        if record is None:
            return
        blocks = tuple(dict.fromkeys(hint.blocks[:LONGEST_CHAIN]))
        session = LiveSession(hint.key, blocks, _honest(hint.keep_s), now_s)
        before, dropped = self._sessions.begin_turn(record, hint.session, session)
        self._release(before, hint.key, ENDED)
        self._release(dropped, hint.key, PLAIN)
        keep_s = session.keep_s if record.is_believed else None
        found = [(block, self._facts[block]) for block in blocks if block in self._facts]
        for block, facts in reversed(found):
            is_free = record.num_kept < self._sessions.budget.kept_blocks or facts.owner == hint.key
            if is_free and not self._sessions.is_shared(block):
                self._move(block, facts, _of_session(facts, keep_s))
                facts.owner = hint.key
                record.num_kept += 1

    def _release(self, blocks: Sequence[BlockHash], key: str, which: int) -> None:
        """Changes the class of blocks that this key's hints keep, unless a live session has
        them.
        """
        for block in reversed(blocks):
            facts = self._facts.get(block)
            if facts is not None and facts.owner == key and not self._sessions.is_live(block):
                self._move(block, facts, ENDED if which == ENDED else _plain(facts))


def _plain(facts: BlockFacts) -> int:
    return PLAIN + min(max(facts.num_turns, facts.num_uses - 1), MOST_TURNS)


def _of_session(facts: BlockFacts, keep_s: float | None) -> int:
    if keep_s is None:
        return SESSION + min(facts.num_turns, MOST_TURNS)
    return KEPT + min(max(round(2 * math.log2(max(keep_s, 1.0))), 0), NUM_KEPT - 1)


def _turns_after(before: BlockFacts) -> int:
    """Returns the initial number of turns of a block whose parent is `before`."""
    if before.num_continuations > FANOUT:
        return 0
    return before.num_turns if before.num_uses == 1 else before.num_uses - 1


def _honest(keep_s: float | None) -> float | None:
    """Returns `keep_s` if it is a positive, finite number of seconds, else None."""
    return keep_s if keep_s is not None and 0 < keep_s < math.inf else None
