"""Copies workers' blocks into a store: decides when to copy, in which order and in which batches.

Block events of workers are only hints. The store asks a worker for a lease on blocks with certain
hashes. The worker leases the blocks that it still has, and the store pulls them like any sink.

One pull of a limited number of blocks runs at a time. After a pull, the store pauses in proportion
to the pull's time and bytes. While sinks pull from the store, the pause is longer, up to a bound,
so that reads have priority over writes. A worker's new blocks are pulled once there are enough for
a batch, or after `settle_s`.

A block is useful only together with all blocks before it. So a block is pulled with the blocks of
its prefix that the store lacks. If the worker has evicted one of these blocks, the block is an
orphan and is not pulled.

Blocks that enough other stores have are not pulled. Copies of a hot prefix spread nevertheless:
sinks cache the prefix, and the store on a sink's node pulls it from the sink.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from engine.messages import BlocksOffered, Cancel, OfferBlocks, SeqId, WorkerId
from engine.worker.block_events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Medium,
)
from engine.worker.blocks import BlockHash, BlockId
from engine.worker.events import HoldLease, PullDone, PullFailed, StartPull
from kvtransfer.store.events import AskPeer, StoreEffect
from kvtransfer.store.holdings import Holdings

ANSWER_TIMEOUT_S = 5.0  # longest wait for a worker's answer; workers answer between two steps
MAX_HELD = 4_000_000  # most recorded blocks of one peer; further blocks are ignored


@dataclass(frozen=True, slots=True)
class IntakePace:
    """The limits on pulls from workers."""

    batch_blocks: int = 64  # largest number of blocks in one pull
    settle_s: float = 0.25  # longest wait of new blocks for a full batch, seconds
    bytes_per_s: float = math.inf
    duty: float = 0.25  # largest share of the time during which pulls run
    yield_s: float = 1.0  # longest extra pause while sinks pull from this store, seconds
    copies: int = 2  # number of stores that should have a block; further stores do not pull it


@dataclass(slots=True)
class _Peer:
    """A peer's cached blocks, and the blocks among them that the store has not examined yet."""

    is_store: bool
    # parent of each cached block
    held: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    # arrival time of each unexamined block
    new: "OrderedDict[BlockHash, float]" = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Taking:
    """The batch that a worker is asked for, or that is being pulled."""

    peer_id: WorkerId
    seq_id: SeqId
    blocks: tuple[BlockHash, ...]
    parents: tuple[BlockHash | None, ...]
    due_s: float  # time until which the worker must answer
    places: tuple[int, ...] = ()  # indices in `blocks` of the blocks that the lease covers
    slots: tuple[BlockId, ...] = ()


class StoreIntake:
    """Tracks the blocks of workers, and pulls one batch after the other."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        name: str,
        block_bytes: int,
        pace: IntakePace,
        counters: Counter[str],
    ) -> None:
        """`name` is the prefix of the pulls' ids. It must be new at each start of the store."""
        self._holdings = holdings
        self._name = name
        self._block_bytes = block_bytes
        self.pace = pace
        self._counters = counters
        self._peers: dict[WorkerId, _Peer] = {}
        # number of copies of each block in other stores' memory
        self._copies: Counter[BlockHash] = Counter()
        self._taking: _Taking | None = None
        self._num_asked = 0
        self._next_s = 0.0  # earliest time at which the next batch may be asked for
        self.taken: list[BlockHash] = []  # new blocks in memory that the machine has not read yet

    @property
    def num_new(self) -> int:
        """The number of blocks that workers cached, and that this store has not examined yet."""
        return sum(len(peer.new) for peer in self._peers.values())

    @property
    def is_busy(self) -> bool:
        """True while the store asks a worker for a batch or pulls it."""
        return self._taking is not None

    # ------------------------------------------------------------ peers

    def join(self, peer_id: WorkerId, *, is_store: bool) -> None:
        """Starts to track a peer's blocks."""
        self.lose(peer_id)
        self._peers[peer_id] = _Peer(is_store)

    def lose(self, peer_id: WorkerId) -> None:
        """Removes a peer. A running pull from this peer ends by itself."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None and peer.is_store:
            self._copies.subtract(peer.held.keys())
            self._copies += Counter()
        taking = self._taking
        if taking is not None and taking.peer_id == peer_id and not taking.slots:
            self._taking = None  # the lost peer will not answer

    def follow(self, peer_id: WorkerId, events: Sequence[BlockEvent], now_s: float) -> None:
        """Applies block events of a peer to its recorded blocks."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        for event in events:
            match event:
                case BlockStored():
                    if not peer.is_store or event.medium == Medium.HOST:
                        self._note_stored(peer, event, now_s)
                case BlockRemoved():
                    if not peer.is_store or event.medium == Medium.HOST:
                        self._note_removed(peer, cast("list[BlockHash]", event.block_hashes))
                case AllBlocksCleared():
                    self._note_removed(peer, list(peer.held))

    def _note_stored(self, peer: _Peer, event: BlockStored, now_s: float) -> None:
        parent = cast("BlockHash | None", event.parent_block_hash)
        for each in event.block_hashes:
            block = BlockHash(each)
            if block not in peer.held and len(peer.held) < MAX_HELD:
                peer.held[block] = parent
                if peer.is_store:
                    self._copies[block] += 1
                else:
                    peer.new[block] = now_s
            parent = block

    def _note_removed(self, peer: _Peer, blocks: Sequence[BlockHash]) -> None:
        for block in blocks:
            if peer.held.pop(block, peer) is peer:
                continue
            peer.new.pop(block, None)
            if peer.is_store:
                self._copies[block] -= 1
                if not self._copies[block]:
                    del self._copies[block]

    # ------------------------------------------------------------ the next batch

    def advance(self, now_s: float, *, num_leases: int) -> list[StoreEffect]:
        """Asks for the next batch if it is due. `num_leases` is the number of leases of sinks."""
        taking = self._taking
        if taking is not None:
            if taking.slots or now_s < taking.due_s:
                return []
            self._counters["dropped_blocks:no_answer"] += len(taking.blocks)
            self._taking = None
            return [AskPeer(taking.peer_id, Cancel(taking.seq_id))]
        if now_s < self._next_s or (num_leases and now_s < self._next_s + self.pace.yield_s):
            return []
        for peer_id in list(self._peers):
            blocks = self._next_of(self._peers[peer_id], now_s)
            if blocks:
                # moves the peer to the end of the order in which peers are asked
                self._peers[peer_id] = self._peers.pop(peer_id)
                return [self._ask(peer_id, blocks, now_s)]
        return []

    def next_wake_s(self) -> float | None:
        """Returns when to call `advance` next; None if an event must come first."""
        if self._taking is not None:
            return None if self._taking.slots else self._taking.due_s
        oldest = [next(iter(p.new.values())) for p in self._peers.values() if p.new]
        if not oldest:
            return None
        return max(min(oldest) + self.pace.settle_s, self._next_s)

    def _next_of(self, peer: _Peer, now_s: float) -> list[BlockHash]:
        """Removes the next batch from a worker's new blocks. Returns the batch, parents first."""
        batch: dict[BlockHash, None] = {}
        while peer.new and len(batch) < self.pace.batch_blocks:
            block, since_s = next(iter(peer.new.items()))
            is_young = now_s - since_s < self.pace.settle_s
            if is_young and not batch and len(peer.new) < self.pace.batch_blocks:
                break
            del peer.new[block]
            if not self._is_wanted(block) or block in batch:
                continue
            chain = self._chain(peer, block, batch)
            if chain is None:
                self._counters["dropped_blocks:orphan"] += 1
                continue
            for each in chain[: self.pace.batch_blocks - len(batch)]:
                batch[each] = None
            if block not in batch:  # the batch is full, and this block starts the next batch
                peer.new[block] = since_s
                peer.new.move_to_end(block, last=False)
        return list(batch)

    def _is_wanted(self, block: BlockHash) -> bool:
        if block in self._holdings or block in self._holdings.loads:
            return False
        return self._copies[block] < self.pace.copies

    def _chain(
        self, peer: _Peer, block: BlockHash, batch: dict[BlockHash, None]
    ) -> list[BlockHash] | None:
        """Returns the missing blocks before `block`, then `block`; None if one is unavailable."""
        chain = [block]
        met = {block}
        parent = peer.held.get(block)
        while parent is not None and parent not in self._holdings and parent not in batch:
            if parent not in peer.held or parent in met:
                return None
            chain.append(parent)
            met.add(parent)
            parent = peer.held[parent]
        chain.reverse()
        return chain

    def _ask(self, peer_id: WorkerId, blocks: Sequence[BlockHash], now_s: float) -> AskPeer:
        seq_id = SeqId(f"{self._name}-{self._num_asked}")
        self._num_asked += 1
        held = self._peers[peer_id].held
        parents = tuple(held.get(block) for block in blocks)
        due_s = now_s + ANSWER_TIMEOUT_S
        self._taking = _Taking(peer_id, seq_id, tuple(blocks), parents, due_s)
        return AskPeer(peer_id, OfferBlocks(seq_id, list(blocks)))

    # ------------------------------------------------------------ the pull

    def on_offered(self, peer_id: WorkerId, offered: BlocksOffered) -> list[StoreEffect]:
        """Pulls the blocks that the worker has leased."""
        taking = self._taking
        is_asked = taking is not None and taking.seq_id == offered.seq_id and not taking.slots
        if taking is None or not is_asked or taking.peer_id != peer_id:
            return [] if offered.lease is None else [AskPeer(peer_id, Cancel(offered.seq_id))]
        lease, held = offered.lease, offered.held
        self._counters["dropped_blocks:not_held"] += len(taking.blocks) - len(held)
        if lease is None or not _fits(held, len(taking.blocks), lease.num_blocks):
            self._taking = None
            return [] if lease is None else [AskPeer(peer_id, Cancel(offered.seq_id))]
        slots = self._holdings.take(len(held))
        if not slots:
            self._counters["dropped_blocks:no_room"] += len(held)
            self._taking = None
            return [AskPeer(peer_id, Cancel(offered.seq_id))]
        self._counters["dropped_blocks:no_room"] += len(held) - len(slots)
        taking.places, taking.slots = tuple(held[: len(slots)]), tuple(slots)
        blocks = tuple(enumerate(slots))
        return [HoldLease(taking.seq_id, lease), StartPull(taking.seq_id, blocks)]

    def on_pulled(self, ended: PullDone | PullFailed, now_s: float) -> None:
        """Adds the blocks that arrived to memory."""
        taking = self._taking
        assert taking is not None
        assert taking.seq_id == ended.seq_id
        self._taking = None
        good = range(len(taking.slots)) if isinstance(ended, PullDone) else frozenset(ended.arrived)
        for number, (place, slot) in enumerate(zip(taking.places, taking.slots, strict=True)):
            if number not in good:
                self._holdings.memory.give_back(slot)
                continue
            block, parent = taking.blocks[place], taking.parents[place]
            if self._holdings.put(slot, block, parent, now_s):
                self.taken.append(block)
        self._counters["taken_blocks"] += len(good)
        self._counters["dropped_blocks:pull_failed"] += len(taking.slots) - len(good)
        num_bytes = len(taking.slots) * self._block_bytes
        busy_s = ended.transfer_s if isinstance(ended, PullDone) else ANSWER_TIMEOUT_S
        pause_s = max(num_bytes / self.pace.bytes_per_s, busy_s * (1 / self.pace.duty - 1))
        self._next_s = now_s + pause_s

    def validate(self) -> None:
        """Asserts the invariants of the intake."""
        for peer in self._peers.values():
            assert peer.new.keys() <= peer.held.keys()
        assert min(self._copies.values(), default=1) > 0


def _fits(held: Sequence[int], num_asked: int, num_leased: int) -> bool:
    """True if `held` has `num_leased` ascending indices of `num_asked` blocks, at least one."""
    ascends = all(a < b for a, b in pairwise(held))
    return (
        bool(held)
        and ascends
        and held[0] >= 0
        and held[-1] < num_asked <= 2**20
        and (len(held) == num_leased)
    )
