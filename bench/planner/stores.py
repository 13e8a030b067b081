"""Finds out whether stores of KV lower the cost of a plan.

The best way of a plan is simulated again with a store on each node of eight GPUs, in a few sizes.
With a store, prompts need not recompute blocks that workers have evicted. So fewer workers may meet
the bounds; the search starts from the plan's size and only shrinks it. A store lowers the cost if
the saved GPUs cost more than its memory and disk:

    USD an hour = GPUs · price + stores · (memory GiB · price + disk GiB · price)

Each cell of the load has its own stores, as in the simulation. A node with few workers pays for a
whole store. Stores take blocks as fast as workers make them; `take_bytes_per_s` says how fast that
is, and the server's `store.take_mib_per_s` has to allow it.

Prices are round figures, of the order of what clouds ask for more memory in a machine and for
volumes of fast disks in 2026. They are to be replaced by one's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from bench.planner.load import ExpectedLoad, PoolEstimate
from bench.planner.pricing import PlannedWorker
from bench.planner.search import Search, Simulated
from bench.simulator.tiers import SimulatedStores, StoreSizes
from engine.errors import ConfigError
from engine.layout import KVLayout

NODE_GPUS = 8
MEMORY_GIB_HOUR_USD = 0.004
DISK_GIB_HOUR_USD = 0.0001
TAKE_BYTES_PER_S = 1e12  # faster than any link: the price of pulls is the limit
TRIED = (
    StoreSizes(64),
    StoreSizes(256),
    StoreSizes(1024),
    StoreSizes(256, 8192),
)


@dataclass(frozen=True, slots=True)
class StorePrices:
    """The price of a store's memory and disk, in USD a GiB and hour."""

    memory_gib_hour_usd: Annotated[float, typer.Option(help="Price of a store's memory.")] = (
        MEMORY_GIB_HOUR_USD
    )
    disk_gib_hour_usd: Annotated[float, typer.Option(help="Price of a store's disk.")] = (
        DISK_GIB_HOUR_USD
    )

    def __post_init__(self) -> None:
        if min(self.memory_gib_hour_usd, self.disk_gib_hour_usd) < 0:
            raise ConfigError("prices of memory and disk must not be negative")

    def usd_per_hour(self, sizes: StoreSizes) -> float:
        """Returns the price of one store."""
        memory_usd = sizes.memory_gib * self.memory_gib_hour_usd
        return memory_usd + sizes.disk_gib * self.disk_gib_hour_usd


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """The plan with stores of one size; `simulated` is None if the size misses the bounds."""

    sizes: StoreSizes  # per store
    num_stores: int
    gpus: int
    simulated: Simulated | None
    usd_per_hour: float
    usd_per_million_tokens: float

    @property
    def label(self) -> str:
        """The size of one store as text."""
        disk = f" + {self.sizes.disk_gib:g} GiB of disk" if self.sizes.disk_gib else ""
        return f"{self.sizes.memory_gib:g} GiB of memory{disk}"


def offers(
    search: Search,
    start: PoolEstimate,
    worker: PlannedWorker,
    prices: StorePrices,
    *,
    usd: float,
    tried: Sequence[StoreSizes] = TRIED,
) -> tuple[StoreOffer, ...]:
    """Returns the plan with stores of each size that holds a block. `usd` buys a GPU hour.

    `start` has the pools of one cell that meet the bounds without stores.
    """
    fitting = [sizes for sizes in tried if _holds_a_block(sizes, worker.hardware.layout)]
    return tuple(_offer(search, start, worker, prices, sizes, usd) for sizes in fitting)


def _holds_a_block(sizes: StoreSizes, layout: KVLayout) -> bool:
    try:
        sizes.blocks(layout)
    except ConfigError:
        return False
    return True


def _offer(
    search: Search,
    start: PoolEstimate,
    worker: PlannedWorker,
    prices: StorePrices,
    sizes: StoreSizes,
    usd: float,
) -> StoreOffer:
    ranks = worker.hardware.gpus
    memory, disk, _ = sizes.blocks(worker.hardware.layout)
    stores = SimulatedStores(
        memory,
        disk,
        node_workers=max(NODE_GPUS // ranks, 1),
        take_bytes_per_s=TAKE_BYTES_PER_S,
    )
    found = search.with_stores(stores).smallest(start, max_workers=start.pools.total)
    pools = start.pools if found is None else found.pools
    cells = search.cells.number
    num_stores = stores.num_nodes(pools.total) * cells
    gpus = pools.total * ranks * cells
    usd_per_hour = gpus * usd + num_stores * prices.usd_per_hour(sizes)
    tokens_per_hour = search.load.tokens_per_s * cells * 3600
    cost = usd_per_hour / tokens_per_hour * 1e6
    return StoreOffer(sizes, num_stores, gpus, found, usd_per_hour, cost)


def cheapest(offered: Sequence[StoreOffer]) -> StoreOffer | None:
    """Returns the offer with the least cost that meets the bounds; None if none does."""
    able = [offer for offer in offered if offer.simulated is not None]
    return min(able, key=lambda offer: offer.usd_per_hour, default=None)


def take_bytes_per_s(load: ExpectedLoad, worker: PlannedWorker, num_stores: int) -> float:
    """Returns how fast workers make new KV, for each store."""
    made = load.input_tokens * (1 - load.prefix_hit) + load.output_tokens
    return load.rate_per_s * made * worker.hardware.kv_token_bytes / max(num_stores, 1)


def at_cell(whole: PoolEstimate, simulated: Simulated) -> PoolEstimate:
    """Returns an estimate with the pools that one simulated cell needs."""
    return replace(whole, pools=simulated.pools)


def mib_text(bytes_per_s: float) -> str:
    """Returns a rate as text, rounded up to MiB/s."""
    return f"{math.ceil(bytes_per_s / 2**20):,} MiB/s"
