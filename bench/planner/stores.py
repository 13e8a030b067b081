"""Computes by how much KV stores lower the cost of a plan, if at all.

The best plan is simulated again with a store on each node of eight GPUs, for a few store sizes.
With a store, prompts need not recompute blocks that workers have evicted. So fewer workers may meet
the bounds. The search starts from the plan's size and only reduces it. Stores lower the cost if the
saved GPUs cost more than the stores' memory and disk:

    USD an hour = GPUs · price + stores · (memory GiB · price + disk GiB · price)

Each cell of the load has its own stores, also in the simulation. A node with few workers pays for a
whole store. Simulated stores take in blocks as fast as workers compute them. `take_bytes_per_s`
returns this rate; the server's setting `store.take_mib_per_s` must allow it.

Prices are round figures, similar to cloud prices of 2026 for memory and for volumes of fast disks.
Users should replace them by their own prices.
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
TAKE_BYTES_PER_S = 1e12  # faster than any link, so that only the price of pulls limits the rate
TRIED = (
    StoreSizes(64),
    StoreSizes(256),
    StoreSizes(1024),
    StoreSizes(256, 8192),
)


@dataclass(frozen=True, slots=True)
class StorePrices:
    """The price of a store's memory and of its disk, in USD per GiB and hour."""

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
        """Returns the price of one store in USD per hour."""
        memory_usd = sizes.memory_gib * self.memory_gib_hour_usd
        return memory_usd + sizes.disk_gib * self.disk_gib_hour_usd


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """The plan with stores of one size. `simulated` is None if this size misses the bounds."""

    sizes: StoreSizes  # size of each store
    num_stores: int
    gpus: int
    simulated: Simulated | None
    usd_per_hour: float
    usd_per_million_tokens: float

    @property
    def label(self) -> str:
        """Returns the size of one store as text."""
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
    """Returns the plan with stores, for each size that has room for a block. `usd` is the price of
    a GPU hour.

    `start` is the pools of one cell with which the bounds are met without stores.
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
    """Returns the cheapest offer that meets the bounds; None if no offer does."""
    able = [offer for offer in offered if offer.simulated is not None]
    return min(able, key=lambda offer: offer.usd_per_hour, default=None)


def take_bytes_per_s(load: ExpectedLoad, worker: PlannedWorker, num_stores: int) -> float:
    """Returns the bytes per second of new KV that workers compute, per store."""
    made = load.input_tokens * (1 - load.prefix_hit) + load.output_tokens
    return load.rate_per_s * made * worker.hardware.kv_token_bytes / max(num_stores, 1)


def at_cell(whole: PoolEstimate, simulated: Simulated) -> PoolEstimate:
    """Returns a copy of the estimate with the pools that one simulated cell needs."""
    return replace(whole, pools=simulated.pools)


def mib_text(bytes_per_s: float) -> str:
    """Returns a rate as text in whole MiB/s, rounded up."""
    return f"{math.ceil(bytes_per_s / 2**20):,} MiB/s"
