"""The core of a store, without I/O: keeps, offers and pulls blocks, and copies them to lower tiers.

Events go in and effects come out. After each event, the machine starts the work that is due:
pulling the next batch from a worker, and the next writes to a lower tier. `next_wake_s` returns
when to send `StoreTick`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import StoreWrites
from engine.messages import (
    WRONG_ROLE,
    BlocksOffered,
    Cancel,
    Decode,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    LoadReport,
    OfferBlocks,
    OfferPrefix,
    PinBlocks,
    Prefetch,
    Prefill,
    SeqId,
    SessionEnd,
    SessionUse,
    StoreHint,
    TransferAddress,
    UnpinBlocks,
)
from engine.worker.block_events import LOWER_MEDIA, Medium
from engine.worker.blocks import BlockHash, CacheEvent
from engine.worker.events import (
    Emit,
    FromGateway,
    GatewayLost,
    LeaseEnded,
    PullDone,
    PullFailed,
)
from engine.worker.intake import ReadPrompt, read_prompt
from engine.worker.offers import prefix_lease_id
from kvtransfer.store.events import (
    BlockLoaded,
    BlockWritten,
    DropAll,
    FromPeer,
    PeerJoined,
    PeerLost,
    PeerNews,
    StoreEffect,
    StoreEvent,
    StoreTick,
    TierGrown,
    TierListed,
    TierTurned,
)
from kvtransfer.store.eviction.seam import (
    BlocksPinned,
    BlocksUnpinned,
    SessionEnded,
    SessionHint,
    SessionUsed,
)
from kvtransfer.store.holdings import Holdings
from kvtransfer.store.intake import IntakePace, StoreIntake
from kvtransfer.store.offers import LOAD_TIMEOUT_S, StoreOffers
from kvtransfer.store.shelf import Shelf
from kvtransfer.store.write_down import WriteDown


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """The settings of a store. `name` is the prefix of the ids of the store's pulls, new at each
    start.
    """

    name: str
    block_size: int
    block_bytes: int
    address: TransferAddress
    pace: IntakePace
    writes: StoreWrites = StoreWrites.THROUGH
    read: ReadPrompt = read_prompt


class StoreMachine:
    """All state of a store. Owned by one thread."""

    def __init__(self, terms: StoreTerms, shelves: Mapping[Medium, Shelf]) -> None:
        """`shelves` has a shelf for memory, and one for each lower tier, with the recovered
        blocks.
        """
        self._counters: Counter[str] = Counter()
        self.holdings = Holdings(shelves)
        self.offers = StoreOffers(
            self.holdings,
            block_size=terms.block_size,
            address=terms.address,
            counters=self._counters,
            read=terms.read,
        )
        self.intake = StoreIntake(
            self.holdings,
            name=terms.name,
            block_bytes=terms.block_bytes,
            pace=terms.pace,
            counters=self._counters,
        )
        self._writes = terms.writes
        self._downs: list[WriteDown] = []
        for medium in LOWER_MEDIA:
            if medium in shelves:
                self._write_to(medium)

    def handle(self, event: StoreEvent, now_s: float) -> list[StoreEffect]:
        """Handles an event, and starts the work that is due."""
        effects = self._handle(event, now_s)
        effects += self.offers.revoke_late(now_s)
        effects += self.intake.advance(now_s, num_leases=len(self.offers.leases))
        self._pass_down()
        for down in self._downs:
            effects += down.advance()
        return effects

    def add_tier(self, medium: Medium, shelf: Shelf) -> None:
        """Adds a lower tier that could not be used when the store started."""
        self.holdings.add(medium, shelf)
        self._write_to(medium)

    def _write_to(self, medium: Medium) -> None:
        self._downs.append(WriteDown(self.holdings, medium, self._writes, self._counters))

    def pop_events(self) -> list[CacheEvent]:
        """Returns the additions and removals of blocks on each medium since the last call."""
        return self.holdings.pop_events()

    def next_wake_s(self) -> float | None:
        """Returns when the next work is due by time alone; None if all work waits for events."""
        wakes = [self.intake.next_wake_s()]
        oldest = next(iter(self.holdings.loads.values()), None)
        if oldest is not None:
            wakes.append(oldest.begun_s + LOAD_TIMEOUT_S)
        return min((wake for wake in wakes if wake is not None), default=None)

    def load(self, open_leases: int, counters: Mapping[str, float]) -> LoadReport:
        """Returns the store's load: blocks in memory, and `counters` with the machine's own."""
        counts = self.holdings.memory.counts()
        return LoadReport(
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            owned_blocks=counts.owned,
            leased_blocks=counts.leased,
            in_flight_blocks=counts.in_flight,
            waiting_seqs=0,
            running_seqs=0,
            open_leases=open_leases,
            counters={**counters, **self.counters},
        )

    @property
    def counters(self) -> dict[str, float]:
        """Counters since the start, by `name` or `name:reason`."""
        evicted = {
            f"evicted_blocks:{medium}": shelf.num_evicted
            for medium, shelf in self.holdings.shelves.items()
        }
        return {**self._counters, **self.holdings.counters, **evicted}

    def validate(self) -> None:
        """Asserts the invariants of all parts of the store."""
        self.holdings.validate()
        self.offers.validate()
        self.intake.validate()
        for down in self._downs:
            down.validate()

    # ------------------------------------------------------------ events

    def _handle(self, event: StoreEvent, now_s: float) -> list[StoreEffect]:  # noqa: C901
        match event:
            case FromGateway():
                return self._on_message(event, now_s)
            case GatewayLost(gateway_id):
                return self.offers.remove_gateway(gateway_id)
            case LeaseEnded(lease_id):
                self.offers.end(lease_id)
            case PullDone() | PullFailed():
                self.intake.on_pulled(event, now_s)
            case PeerJoined(peer_id, is_store):
                self.intake.join(peer_id, is_store=is_store)
            case PeerLost(peer_id):
                self.intake.lose(peer_id)
            case PeerNews(peer_id, events):
                self.intake.follow(peer_id, events, now_s)
            case FromPeer(peer_id, message):
                return self.intake.on_offered(peer_id, message)
            case BlockLoaded():
                return self._on_loaded(event, now_s)
            case BlockWritten(medium, block, fault):
                down = next(each for each in self._downs if each.medium is medium)
                return [*down.on_written(block, fault, now_s)]
            case TierTurned(medium, fault):
                self.holdings.turn(medium, fault)
            case TierGrown(medium, num_slots):
                self.holdings.shelves[medium].grow(num_slots)
            case TierListed(medium, links):
                self.holdings.list_all(medium, links, now_s)
            case DropAll():
                return self._drop_all()
            case StoreTick():
                pass
        return []

    def _on_message(self, event: FromGateway, now_s: float) -> list[StoreEffect]:
        match event.message:
            case OfferPrefix() as message:
                effects = self.offers.offer(event.gateway_id, message, now_s)
                self._note_used(message.seq_id)
                return effects
            case Prefetch(hashes):
                return self.offers.prefetch([BlockHash(each) for each in hashes], now_s)
            case SessionUse() | SessionEnd() | PinBlocks() | UnpinBlocks() as message:
                self._take_hint(_hint_of(message), now_s)
            case Cancel(seq_id):
                return self.offers.cancel(prefix_lease_id(seq_id))
            case Prefill(seq_id) | Generate(seq_id) | Decode(seq_id):
                return [Emit(event.gateway_id, GivenBack(seq_id, WRONG_ROLE))]
            case HandOver(seq_id):
                return [Emit(event.gateway_id, HandedOver(seq_id, None))]
            case OfferBlocks(seq_id):
                return [Emit(event.gateway_id, BlocksOffered(seq_id, None))]
        return []

    def _take_hint(self, hint: SessionHint, now_s: float) -> None:
        for shelf in self.holdings.shelves.values():
            shelf.eviction.hint(hint, now_s)

    def _on_loaded(self, event: BlockLoaded, now_s: float) -> list[StoreEffect]:
        effects: list[StoreEffect] = [*self.holdings.end_load(event.block, event.fault, now_s)]
        return effects + self.offers.on_loaded(event.slot, is_good=event.fault is None)

    def _note_used(self, seq_id: SeqId) -> None:
        lease = self.offers.leases.get(prefix_lease_id(seq_id))
        if lease is not None:
            for down in self._downs:
                down.used(lease.blocks)

    def _pass_down(self) -> None:
        """Queues the new blocks in memory for copying to the lower tiers."""
        taken, self.intake.taken = self.intake.taken, []
        if taken:
            for down in self._downs:
                down.came(taken)

    def _drop_all(self) -> list[StoreEffect]:
        """Drops all blocks. Slots that sinks read become free when their leases end."""
        for down in self._downs:
            down.drop_all()
        effects = self.offers.revoke_incomplete()
        for medium in self.holdings.shelves:
            effects += self.holdings.drop_all(medium)
        return effects


def _hint_of(message: StoreHint) -> SessionHint:
    """Converts a gateway's message to a hint for eviction policies."""
    match message:
        case SessionUse(key, session, hashes, keep_s):
            return SessionUsed(key, session, _blocks(hashes), keep_s)
        case SessionEnd(key, session):
            return SessionEnded(key, session)
        case PinBlocks(key, hashes):
            return BlocksPinned(key, _blocks(hashes))
        case UnpinBlocks(key, hashes):
            return BlocksUnpinned(key, _blocks(hashes))


def _blocks(hashes: Sequence[bytes]) -> tuple[BlockHash, ...]:
    return tuple(map(BlockHash, hashes))
