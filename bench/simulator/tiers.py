"""The settings of simulated stores, and the prices of the tiers below their memory.

A lower tier performs a limited number of reads and writes at once. Waiting reads start before
waiting writes. Each read or write first takes `fixed_s`. Then its bytes pass the tier's only
channel, one block after the other:

    ends = max(begins + fixed_s, when the channel is free) + bytes / rate

So a tier with few concurrent requests is limited by its latency, and a busy tier by its rate.
Faults of tiers are not simulated. Blocks are written to the object store one by one, not in
segments.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulator.transfers import Future, Rank
from engine.config import StoreEviction, StoreWrites
from engine.errors import ConfigError
from engine.layout import KVLayout
from engine.worker.block_events import Medium
from kvtransfer.store.events import BlockLoaded, BlockWritten, LoadBlock, WriteBlock
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.leaf_worth import LeafWorth
from kvtransfer.store.eviction.seam import Eviction

GIB = 2**30
DISK_REQUESTS, OBJECT_REQUESTS = 16, 64  # most concurrent reads and writes


@dataclass(frozen=True, slots=True)
class TierPrice:
    """The price of a lower tier's reads and writes."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    fixed_s: float  # seconds that each request takes before its bytes are sent
    max_requests: int  # most concurrent reads and writes

    def __post_init__(self) -> None:
        if min(self.read_bytes_per_s, self.write_bytes_per_s) <= 0 or self.fixed_s < 0:
            raise ConfigError("a tier of a store needs positive rates, and no negative latency")
        if self.max_requests < 1:
            raise ConfigError("a tier of a store takes at least one request at once")


LOCAL_DISK = TierPrice(6 * GIB, 3 * GIB, 2e-4, DISK_REQUESTS)  # a fast NVMe drive
FAR_OBJECTS = TierPrice(1 * GIB, 1 * GIB, 0.05, OBJECT_REQUESTS)  # an object store; round figures


@dataclass(frozen=True, slots=True)
class SimulatedStores:
    """The settings of a cluster's stores. Each node has one, and all are alike. Sizes are per
    store.
    """

    memory_blocks: int
    disk_blocks: int = 0
    object_blocks: int = 0
    disk: TierPrice = LOCAL_DISK
    objects: TierPrice = FAR_OBJECTS
    node_workers: int = 8  # workers per node; the last node may have fewer
    eviction: StoreEviction = StoreEviction.WORTH
    writes: StoreWrites = StoreWrites.THROUGH
    copies: int = 2  # the `copies` of `engine.config.StoreConfig`
    take_bytes_per_s: float = GIB / 2

    def __post_init__(self) -> None:
        if self.memory_blocks < 1 or min(self.disk_blocks, self.object_blocks) < 0:
            raise ConfigError("the memory of a store must hold a block, and no tier less than none")
        if min(self.node_workers, self.copies) < 1 or self.take_bytes_per_s <= 0:
            raise ConfigError("stores need workers on their nodes, copies, and a rate above 0")

    def num_nodes(self, num_workers: int) -> int:
        """Returns the number of a cluster's nodes. Each node has one store."""
        return -(-num_workers // self.node_workers)

    def lower(self) -> dict[Medium, tuple[int, TierPrice]]:
        """Returns size in blocks and price of each tier below memory, the fastest tier first."""
        tiers = {
            Medium.DISK: (self.disk_blocks, self.disk),
            Medium.OBJECT: (self.object_blocks, self.objects),
        }
        return {medium: tier for medium, tier in tiers.items() if tier[0]}

    def policy(self, num_blocks: int) -> Eviction:
        """Returns the eviction policy of a tier of this size."""
        return LeafLru() if self.eviction is StoreEviction.LRU else LeafWorth(num_blocks)


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """KV in GiB on each medium of one store; 0: the store does not have the medium."""

    memory_gib: float
    disk_gib: float = 0.0
    objects_gib: float = 0.0

    def blocks(self, layout: KVLayout) -> tuple[int, int, int]:
        """Returns the number of blocks on each medium. Raises ConfigError if a medium has no room
        for a block.
        """
        sizes = (self.memory_gib, self.disk_gib, self.objects_gib)
        memory, disk, objects = (int(size * GIB // layout.block_bytes) for size in sizes)
        if any(size and not num for size, num in zip(sizes, (memory, disk, objects), strict=True)):
            raise ConfigError(f"a tier of a store needs room for {layout.block_bytes:,} bytes")
        return memory, disk, objects


NO_STORE = StoreSizes(0.0)


class SimulatedTier:
    """The reads and writes of one lower tier, in the order of its store's requests."""

    def __init__(
        self,
        medium: Medium,
        price: TierPrice,
        *,
        block_bytes: int,
        future: Future,
        on_done: Callable[[BlockLoaded | BlockWritten], None],
    ) -> None:
        self._medium = medium
        self._price = price
        self._future = future
        self._on_done = on_done
        self._read_s = block_bytes / price.read_bytes_per_s
        self._write_s = block_bytes / price.write_bytes_per_s
        self._loads: deque[LoadBlock] = deque()
        self._writes: deque[WriteBlock] = deque()
        self._num_open = 0
        self._free_s = 0.0  # time at which the channel is free

    def gauges(self) -> dict[str, float]:
        """Returns the price of a read, in the form in which a live store reports its read time."""
        return {
            f"load_fixed_s:{self._medium}": self._price.fixed_s + self._read_s,
            f"load_block_s:{self._medium}": self._read_s,
        }

    def submit(self, effect: LoadBlock | WriteBlock) -> None:
        """Starts a read or a write, at once or after others have ended."""
        if isinstance(effect, LoadBlock):
            self._loads.append(effect)
        else:
            self._writes.append(effect)
        self._advance()

    def _advance(self) -> None:
        while self._num_open < self._price.max_requests and (self._loads or self._writes):
            self._num_open += 1
            done: BlockLoaded | BlockWritten
            if self._loads:
                load = self._loads.popleft()
                done, seconds = BlockLoaded(self._medium, load.block, load.slot), self._read_s
            else:
                write = self._writes.popleft()
                done, seconds = BlockWritten(self._medium, write.block), self._write_s
            begins_s = max(self._future.now_s + self._price.fixed_s, self._free_s)
            self._free_s = begins_s + seconds
            self._future.plan(self._free_s, Rank.MESSAGE, self._on_end, done)

    def _on_end(self, done: BlockLoaded | BlockWritten) -> None:
        self._num_open -= 1
        # the store may submit more reads here, which start before waiting writes
        self._on_done(done)
        self._advance()

    def validate(self) -> None:
        """Asserts that no read or write is running."""
        assert not self._num_open
        assert not self._loads
        assert not self._writes
