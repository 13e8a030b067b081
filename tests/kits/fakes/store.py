"""A store's machine between fake workers, sinks and disks, with the contents of every slot.

The contents of a slot are the hash of the block whose KV is really in the slot. The rig acts in the
order of the shell: first the slab's table, then the effects. The rig fails a test as soon as a sink
could read blocks that its lease does not name, or a slot is written while it is read.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from engine.messages import (
    BlocksOffered,
    Cancel,
    GatewayId,
    Incarnation,
    LeaseId,
    LeaseRef,
    OfferBlocks,
    OfferPrefix,
    Prefetch,
    PrefixOffered,
    SeqId,
    TransferAddress,
    WorkerId,
)
from engine.worker.block_events import LOWER_MEDIA, AllBlocksCleared, BlockRemoved, Medium
from engine.worker.blocks import BlockHash, Stored, hash_blocks
from engine.worker.events import (
    Emit,
    FromGateway,
    GatewayLost,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from kvtransfer.store.events import (
    AskPeer,
    BlockLoaded,
    BlockWritten,
    DropAll,
    EraseAll,
    EraseBlock,
    FromPeer,
    LoadBlock,
    PeerJoined,
    PeerLost,
    PeerNews,
    StoreEvent,
    StoreTick,
    TierTurned,
    WriteBlock,
)
from kvtransfer.store.intake import IntakePace
from kvtransfer.store.machine import StoreMachine, StoreTerms
from kvtransfer.store.shelf import Shelf
from tests.kits.fakes.block_events import stored

BLOCK_SIZE = 2
TORN = BlockHash(b"torn")
STORE = TransferAddress(WorkerId("store"), Incarnation("1"), "tcp://store")


@dataclass
class OpenLeaseOfStore:
    """A lease at a sink: the promised blocks, and the slots that the sink may read so far."""

    gateway_id: GatewayId
    blocks: list[BlockHash]
    slots: list[int] = field(default_factory=list)  # slots that the lease has grown to so far
    is_revoked: bool = False


class StoreRig:
    """Workers w0 and w1 cache sequences of one tenant; gateways g0 and g1 ask for prompts."""

    def __init__(self, rng: random.Random, new_policy, *, num_slots=6, num_places=9) -> None:
        self.rng = rng
        self.new_policy = new_policy
        self.num_slots, self.num_places = num_slots, num_places
        self.now_s = 0.0
        self.memory: dict[int, BlockHash] = {}  # the actual contents of slots
        self.table: dict[BlockHash, int] = {}  # the contents that a new process would assume
        # What slots of lower tiers really hold, and what their headers tell a restarted process.
        self.disks: dict[Medium, dict[int, BlockHash]] = {medium: {} for medium in LOWER_MEDIA}
        self.headers: dict[Medium, dict[int, tuple[BlockHash, BlockHash | None]]] = {
            medium: {} for medium in LOWER_MEDIA
        }
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.held: dict[WorkerId, dict[BlockHash, None]] = {WorkerId(f"w{i}"): {} for i in (0, 1)}
        self.prompts: list[list[int]] = []
        self.num_lives = 0
        self.num_asked = 0
        self.counted: Counter[str] = Counter()  # sums of the counters of earlier machines
        self.begin()

    # ------------------------------------------------------------ starts and crashes

    def begin(self) -> None:
        """Starts a machine with the blocks that memory and disk have."""
        self.num_lives += 1
        self.leases: dict[LeaseId, OpenLeaseOfStore] = {}
        self.asks: list[tuple[WorkerId, OfferBlocks]] = []
        self.pulls: dict[SeqId, tuple[LeaseRef, list[BlockHash], list[int] | None]] = {}
        self.offered: dict[SeqId, list[BlockHash]] = {}
        self.loads: list[LoadBlock] = []
        self.writes: list[WriteBlock] = []
        shelves = {
            Medium.HOST: Shelf(self.num_slots, self.new_policy(self.num_slots)),
            **{m: Shelf(self.num_places, self.new_policy(self.num_places)) for m in LOWER_MEDIA},
        }
        for block, slot in self.table.items():
            assert self.memory[slot] == block, "a header names what is not there"
        shelves[Medium.HOST].put_all(self.table, {b: self.parents[b] for b in self.table})
        for medium, headers in self.headers.items():
            found = {block: (place, parent) for place, (block, parent) in headers.items()}
            shelves[medium].put_all(
                {block: place for block, (place, _) in found.items()},
                {block: parent for block, (_, parent) in found.items()},
            )
        terms = StoreTerms(
            f"store.{self.num_lives}",
            BLOCK_SIZE,
            64,
            STORE,
            IntakePace(batch_blocks=4, settle_s=0.1, yield_s=0.2, copies=2),
        )
        self.machine = StoreMachine(terms, shelves)
        for worker in self.held:
            self.join(worker)

    def crash(self) -> None:
        """Kills the process at this moment, and starts another process."""
        for slot in self.written_slots():
            self.memory[slot] = TORN
        self.counted.update(self.machine.counters)
        self.begin()

    def written_slots(self) -> set[int]:
        """Returns the slots that a pull or a load writes to at this moment."""
        pulled = [slot for _, _, slots in self.pulls.values() for slot in slots or ()]
        return {*pulled, *(load.slot for load in self.loads)}

    # ------------------------------------------------------------ shell

    def do(self, event: StoreEvent) -> None:
        """Feeds an event into the machine and carries out the effects as the shell does."""
        effects = self.machine.handle(event, self.now_s)
        for item in self.machine.pop_events():
            if item.medium != Medium.HOST:
                continue
            if isinstance(item, Stored):
                slot = self.machine.holdings.memory.find(item.block_hash)
                if slot is not None:
                    assert self.memory[slot] == item.block_hash
                    self.table[item.block_hash] = slot
            else:
                self.table.pop(item.block_hash, None)
        for effect in effects:
            self.perform(effect)
        self.machine.validate()
        self.check()

    def perform(self, effect) -> None:
        match effect:
            case Emit(gateway_id, PrefixOffered(seq_id, lease)):
                if lease is not None:
                    assert self.leases[lease.lease_id].gateway_id == gateway_id
                    assert lease.num_blocks == len(self.leases[lease.lease_id].blocks)
            case OpenLease(lease_id, num_blocks):
                seq_id = SeqId(lease_id.removesuffix(".prefix"))
                gateway_id = GatewayId(seq_id.split("-")[0])
                self.leases[lease_id] = OpenLeaseOfStore(
                    gateway_id, self.offered[seq_id][:num_blocks]
                )
            case GrowLease(lease_id, slots):
                lease = self.leases[lease_id]
                assert not lease.is_revoked
                lease.slots += slots
                assert len(lease.slots) <= len(lease.blocks)
            case RevokeLease(lease_id):
                self.leases[lease_id].is_revoked = True
            case AskPeer(peer_id, OfferBlocks() as message):
                self.asks.append((peer_id, message))
            case AskPeer(_, Cancel(seq_id)):
                self.asks = [each for each in self.asks if each[1].seq_id != seq_id]
            case HoldLease(seq_id, lease):
                blocks = self.leased[lease.lease_id]
                self.pulls[seq_id] = lease, blocks, None
            case StartPull(seq_id, pairs):
                lease, blocks, _ = self.pulls[seq_id]
                slots = [slot for _, slot in pairs]
                assert [index for index, _ in pairs] == list(range(len(slots)))
                self.begin_writing(slots)
                self.pulls[seq_id] = lease, blocks, slots
            case LoadBlock():
                shelf = self.machine.holdings.shelves[effect.medium]
                assert shelf.find(effect.block) == effect.place
                self.begin_writing([effect.slot])
                self.loads.append(effect)
            case WriteBlock():
                assert self.memory[effect.slot] == effect.block
                self.headers[effect.medium].pop(effect.place, None)
                self.disks[effect.medium][effect.place] = TORN
                self.writes.append(effect)
            case EraseBlock(medium, _, place):
                self.headers[medium].pop(place, None)
            case EraseAll(medium):
                self.headers[medium].clear()
            case _:
                raise AssertionError(f"unexpected {effect}")

    def begin_writing(self, slots) -> None:
        """Marks these slots as being written, after asserting that no sink reads them."""
        named = set(self.table.values())
        read = {write.slot for write in self.writes}
        grown = {slot for lease in self.leases.values() for slot in lease.slots}
        for slot in slots:
            assert slot not in named, "written to under a header"
            assert slot not in read, "written to while it is copied"
            assert slot not in grown, "written to while a sink reads it"
            self.memory[slot] = TORN

    def check(self) -> None:
        """Asserts that sinks read the blocks that their leases name."""
        for lease in self.leases.values():
            for block, slot in zip(lease.blocks, lease.slots, strict=False):
                assert self.memory[slot] == block
        for write in self.writes:
            assert self.memory[write.slot] == write.block

    # ------------------------------------------------------------ possible events

    def join(self, worker: WorkerId) -> None:
        self.do(PeerJoined(worker))
        chains = [AllBlocksCleared(), *(self.stored_event(b) for b in self.held[worker])]
        self.do(PeerNews(worker, chains))

    def stored_event(self, block: BlockHash):
        return stored([block], self.parents[block], block_size=BLOCK_SIZE)

    def cache(self) -> None:
        """A worker caches the blocks of a new prompt or of a longer prompt."""
        worker = self.rng.choice(list(self.held))
        if self.prompts and self.rng.random() < 0.6:
            tokens = list(self.rng.choice(self.prompts))
        else:
            tokens = [len(self.prompts)]
        tokens += [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 7))]
        self.prompts.append(tokens)
        hashes = hash_blocks(tokens, BLOCK_SIZE)
        for parent, block in zip([None, *hashes], hashes, strict=False):
            self.parents[block] = parent
        new = [block for block in hashes if block not in self.held[worker]]
        self.held[worker].update(dict.fromkeys(new))
        if new:
            self.do(PeerNews(worker, [self.stored_event(block) for block in new]))

    def evict(self) -> None:
        """A worker evicts a block."""
        worker = self.rng.choice(list(self.held))
        if self.held[worker]:
            block = self.rng.choice(sorted(self.held[worker]))
            del self.held[worker][block]
            self.do(PeerNews(worker, [BlockRemoved([block], None)]))

    def lose_worker(self) -> None:
        """A worker dies, and a new worker with the same name joins with an empty cache."""
        worker = self.rng.choice(list(self.held))
        self.asks = [each for each in self.asks if each[0] != worker]
        self.held[worker] = {}
        self.do(PeerLost(worker))
        self.join(worker)

    def offer(self) -> None:
        """A gateway asks the store to offer the first blocks of a prompt."""
        if not self.prompts:
            return
        gateway = GatewayId(self.rng.choice(("g0", "g1")))
        tokens = [*self.rng.choice(self.prompts), 99]
        self.num_asked += 1
        seq_id = SeqId(f"{gateway}-{self.num_lives}-{self.num_asked}")
        self.offered[seq_id] = hash_blocks(tokens, BLOCK_SIZE)
        self.do(FromGateway(gateway, OfferPrefix(seq_id, tokens)))

    def prefetch(self) -> None:
        """A gateway announces that a prompt will be placed soon."""
        if self.prompts:
            hashes = hash_blocks(self.rng.choice(self.prompts), BLOCK_SIZE)
            self.do(FromGateway(GatewayId("g0"), Prefetch(list(hashes))))

    def answer(self) -> None:
        """A worker answers an order to offer blocks."""
        if not self.asks:
            return
        worker, message = self.asks.pop(self.rng.randrange(len(self.asks)))
        held = [i for i, h in enumerate(message.hashes) if h in self.held[worker]]
        if not held:
            self.do(FromPeer(worker, BlocksOffered(message.seq_id, None)))
            return
        lease_id = LeaseId(f"{worker}.{message.seq_id}")
        self.leased = {lease_id: [BlockHash(message.hashes[i]) for i in held]}
        address = TransferAddress(worker, Incarnation("1"), f"tcp://{worker}")
        lease = LeaseRef(lease_id, address, len(held))
        self.do(FromPeer(worker, BlocksOffered(message.seq_id, lease, held)))

    def end_pull(self) -> None:
        """A pull succeeds or fails."""
        ready = [seq_id for seq_id, (_, _, slots) in self.pulls.items() if slots is not None]
        if not ready:
            return
        seq_id = self.rng.choice(ready)
        _, blocks, slots = self.pulls.pop(seq_id)
        assert slots is not None
        is_good = self.rng.random() < 0.7
        arrived = range(len(slots))
        if not is_good:
            arrived = sorted(self.rng.sample(arrived, self.rng.randrange(len(slots))))
        for index in arrived:
            self.memory[slots[index]] = blocks[index]
        if is_good:
            self.do(PullDone(seq_id, "shm", 0.01))
        else:
            self.do(PullFailed(seq_id, "source silent", tuple(arrived)))

    def end_load(self) -> None:
        """A read from the disk succeeds or fails."""
        if not self.loads:
            return
        load = self.loads.pop(self.rng.randrange(len(self.loads)))
        fault = None if self.rng.random() < 0.8 else self.rng.choice(("damaged", "EIO"))
        if fault is None:
            assert self.disks[load.medium][load.place] == load.block
            self.memory[load.slot] = load.block
        self.do(BlockLoaded(load.medium, load.block, load.slot, fault))

    def end_write(self) -> None:
        """A write to the disk succeeds or fails."""
        if not self.writes:
            return
        write = self.writes.pop(self.rng.randrange(len(self.writes)))
        fault = None if self.rng.random() < 0.8 else "EIO"
        if fault is None:
            self.disks[write.medium][write.place] = write.block
            self.headers[write.medium][write.place] = write.block, write.parent
        self.do(BlockWritten(write.medium, write.block, fault))

    def end_lease(self) -> None:
        """A sink releases a lease, or the lease closes because it was revoked."""
        if self.leases:
            lease_id = self.rng.choice(list(self.leases))
            del self.leases[lease_id]
            self.do(LeaseEnded(lease_id, "released"))

    def cancel(self) -> None:
        """A gateway cancels a lease, or the gateway is lost."""
        if self.rng.random() < 0.3:
            self.do(GatewayLost(GatewayId(self.rng.choice(("g0", "g1")))))
        elif self.leases:
            lease_id = self.rng.choice(list(self.leases))
            seq_id = SeqId(lease_id.removesuffix(".prefix"))
            self.do(FromGateway(self.leases[lease_id].gateway_id, Cancel(seq_id)))

    def turn(self) -> None:
        """The disk tier is suspended, or works again."""
        medium = self.rng.choice(LOWER_MEDIA)
        self.do(TierTurned(medium, "EIO" if self.rng.random() < 0.3 else None))

    def wait(self) -> None:
        """Time passes."""
        self.now_s += self.rng.choice((0.01, 0.15, 1.0, 6.0))
        self.do(StoreTick())

    def drop_all(self) -> None:
        """An operator drops all blocks."""
        self.do(DropAll())

    STEPS = (
        (cache, 8),
        (evict, 2),
        (lose_worker, 0.3),
        (offer, 8),
        (prefetch, 2),
        (answer, 8),
        (end_pull, 8),
        (end_load, 6),
        (end_write, 8),
        (end_lease, 5),
        (cancel, 1),
        (turn, 0.3),
        (wait, 6),
        (drop_all, 0.1),
        (crash, 0.3),
    )

    def step(self) -> None:
        """Performs one random possible event."""
        kinds, weights = zip(*self.STEPS, strict=True)
        [kind] = self.rng.choices(kinds, weights)
        kind(self)

    def settle(self) -> None:
        """Completes all operations in flight.

        Asserts that no lease or slot is in use afterwards.
        """
        for _ in range(1000):
            busy = [*self.asks, *self.pulls, *self.loads, *self.writes, *self.leases]
            if not busy:
                break
            for end in (self.answer, self.end_pull, self.end_load, self.end_write, self.end_lease):
                end()
        counts = self.machine.holdings.memory.counts()
        assert (counts.owned, counts.leased, counts.in_flight) == (0, 0, 0)
        for medium in LOWER_MEDIA:
            counts = self.machine.holdings.shelves[medium].counts()
            assert (counts.owned, counts.leased, counts.in_flight) == (0, 0, 0)
