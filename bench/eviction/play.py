"""Plays turns on a cache of blocks and counts hits. Pure.

A hit is a block of a prompt's leading run of cached blocks. All policies see the same accesses.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from random import Random

from bench.eviction.classics import BlockCache
from bench.eviction.turns import ChatTurn, num_accesses
from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.hints import SessionEnded, SessionUsed
from kvtransfer.store.eviction.seam import Eviction

NUM_KEYS = 64  # API keys that sessions are spread over
NOISE = 0.5  # spread of the log-normal error of `keep_s`
QUEUE_BLOCKS = 512  # of writes that wait for the disk


class Says(StrEnum):
    """What clients say of their sessions."""

    NOTHING = "nothing"
    IDS = "ids"  # and the end of each session
    NOISY = "noisy"  # also when they will be back, with an error
    EXACT = "exact"


class Writes(StrEnum):
    """Which blocks are stored."""

    ALL = "all"
    TWICE = "twice"  # those that two prompts computed
    IDLE = "idle"  # as many as the disk has time for, the newest first


@dataclass(frozen=True, slots=True)
class PlayPlan:
    """How turns are played on one of our policies. `share` of the sessions give hints."""

    num_blocks: int
    says: Says = Says.NOTHING
    share: float = 1.0
    writes: Writes = Writes.ALL
    writes_per_s: float = 0.0  # for `Writes.IDLE`
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """Hits and writes, as percentages of all blocks of all prompts."""

    hit_percent: float
    written_percent: float


def play_classic(cache: BlockCache, turns: Sequence[ChatTurn]) -> float:
    """The hit rate of a classic policy, in per cent."""
    num_hits = 0
    for turn in turns:
        num_hits += num_leading(turn.blocks, cache)
        for block in turn.blocks:
            cache.access(block)
    return 100 * num_hits / num_accesses(turns)


def num_leading(blocks: Sequence[BlockHash], cache: BlockCache | Eviction) -> int:
    """Blocks of the longest cached prefix."""
    return next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))


def play(policy: Eviction, turns: Sequence[ChatTurn], plan: PlayPlan) -> Played:
    """Plays turns on a policy of ours."""
    hints = _Hints(plan)
    writer = _Writer(plan)
    num_hits = num_written = 0
    for turn in turns:
        for block, parent in writer.due(turn.arrived_s):
            num_written += block not in policy
            policy.add(block, parent, turn.arrived_s)
        found = num_leading(turn.blocks, policy)
        num_hits += found
        policy.use(turn.blocks[:found], turn.arrived_s)
        for block, parent in writer.now(turn.blocks, found):
            num_written += block not in policy
            policy.add(block, parent, turn.arrived_s)
        hints.give(policy, turn)
        if len(policy) > plan.num_blocks:
            policy.choose(len(policy) - plan.num_blocks, lambda _: True)
    total = num_accesses(turns)
    return Played(100 * num_hits / total, 100 * num_written / total)


class _Hints:
    """What clients say, drawn by the plan's seed."""

    def __init__(self, plan: PlayPlan) -> None:
        self._plan = plan
        self._rng = Random(plan.seed)
        self._is_heard: dict[int, bool] = {}

    def give(self, policy: Eviction, turn: ChatTurn) -> None:
        """Says what the client of this turn says."""
        says = self._plan.says
        if says == Says.NOTHING:
            return
        if turn.session not in self._is_heard:
            self._is_heard[turn.session] = self._rng.random() < self._plan.share
        if not self._is_heard[turn.session]:
            return
        key, name = f"key-{turn.session % NUM_KEYS}", str(turn.session)
        keep_s = None if says == Says.IDS else turn.returns_after_s
        if keep_s is not None and says == Says.NOISY:
            keep_s *= self._rng.lognormvariate(0.0, NOISE)
        policy.hint(SessionUsed(key, name, turn.blocks, keep_s), turn.arrived_s)
        if turn.returns_after_s is None:
            policy.hint(SessionEnded(key, name), turn.arrived_s)


class _Writer:
    """Says which blocks are stored, and when."""

    def __init__(self, plan: PlayPlan) -> None:
        self._plan = plan
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        self._queue: deque[tuple[BlockHash, BlockHash | None]] = deque(maxlen=QUEUE_BLOCKS)
        self._last_s = 0.0
        self._credit = 0.0

    def now(
        self, blocks: Sequence[BlockHash], found: int
    ) -> list[tuple[BlockHash, BlockHash | None]]:
        """The blocks of a prompt that are stored at once, with their parents."""
        before = (None, *blocks[:-1])
        links = list(zip(blocks, before, strict=True))[found:]
        match self._plan.writes:
            case Writes.ALL:
                return links
            case Writes.IDLE:
                self._queue.extend(links)
                return []
            case Writes.TWICE:
                known = [link for link in links if link[0] in self._seen]
                self._seen.update(dict.fromkeys(blocks))
                while len(self._seen) > 4 * self._plan.num_blocks:
                    self._seen.popitem(last=False)
                return known

    def due(self, now_s: float) -> list[tuple[BlockHash, BlockHash | None]]:
        """The waiting blocks for which the disk had time since the last turn."""
        self._credit += (now_s - self._last_s) * self._plan.writes_per_s
        self._last_s = now_s
        num_blocks = min(int(self._credit), len(self._queue))
        self._credit = self._credit - num_blocks if self._queue else 0.0
        return [self._queue.popleft() for _ in range(num_blocks)]


def belady_percent(turns: Sequence[ChatTurn], num_blocks: int) -> float:
    """The hit rate of a cache that knows the future: the block goes whose next use is farthest.

    Source: Belady, IBM Systems Journal 1966; with bypass.
    """
    accesses = [block for turn in turns for block in turn.blocks]
    next_use: list[int] = []
    seen: dict[BlockHash, int] = {}
    for place in range(len(accesses) - 1, -1, -1):
        next_use.append(seen.get(accesses[place], len(accesses)))
        seen[accesses[place]] = place
    next_use.reverse()
    cached: dict[BlockHash, int] = {}
    heap: list[tuple[int, BlockHash]] = []
    num_hits = place = 0
    for turn in turns:
        num_hits += next(
            (n for n, block in enumerate(turn.blocks) if block not in cached), len(turn.blocks)
        )
        for block in turn.blocks:
            cached[block] = next_use[place]
            heappush(heap, (-next_use[place], block))
            place += 1
        while len(cached) > num_blocks:
            due, block = heappop(heap)
            if cached.get(block) == -due:
                del cached[block]
    return 100 * num_hits / len(accesses)
