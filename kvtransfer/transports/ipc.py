"""Copies blocks to a pool in a device's memory: from another GPU, or from memory of this host."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from engine.config import Transport
from engine.messages import SeqId
from kvtransfer.device.blocks import DevicePool, Rows, rows_of
from kvtransfer.device.cuda_driver import DriverError, SharedAddress
from kvtransfer.lease.effects import Fetch, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.memory import boot_id
from kvtransfer.messages import Offers
from kvtransfer.transports.seam import (
    READ_BYTES,
    BlocksArrived,
    BlocksFailed,
    FetchEnd,
    TransportUnavailable,
    num_records,
)
from kvtransfer.transports.shm import map_source
from kvtransfer.wire import Wire


class _Mapped(NamedTuple):
    """A source's pool that is mapped into this process."""

    wire: Wire
    rows: Rows
    num_blocks: int
    unmap: Callable[[], object]


class DeviceTransport:
    """Queues copies on the device. `poll` finds the copies that have ended.

    `name` says where the sources' memory is: `ipc` on GPUs, `shm` on the host.
    """

    def __init__(self, name: Transport, pool: DevicePool) -> None:
        self.name = name
        self._pool = pool
        self._device = pool.device
        self._sources: dict[str, _Mapped] = {}
        # by the mark after the fetch's last copy, oldest first
        self._reads: dict[int, tuple[_Mapped, Fetch]] = {}
        self._closing: list[_Mapped] = []  # closed sources whose copies have not ended

    @property
    def num_reads(self) -> int:
        """The number of fetches whose copies have not all ended."""
        return len(self._reads)

    def offer(self, offers: Offers) -> Offers:
        """Offers the pool to other GPUs. Raises TransportUnavailable."""
        if self.name is not Transport.IPC:
            return offers
        try:
            return msgspec.structs.replace(offers, ipc=self._pool.ipc_offer())
        except DriverError as error:
            raise TransportUnavailable(str(error)) from error

    def open(self, use: UseSource) -> Means:
        """Maps the source's pool. Raises TransportUnavailable."""
        self._sources[use.address] = self._map(use)
        return Means(
            self.name,
            batch_blocks=num_records(READ_BYTES, use.wire),
            window_blocks=num_records(2 * READ_BYTES, use.wire),
        )

    def fetch(self, fetch: Fetch) -> Sequence[FetchEnd]:
        """Queues the copies of a fetch. Returns nothing, since no block has arrived yet."""
        source, there = self._sources[fetch.address], fetch.source_blocks
        if not (min(there) >= 0 and max(there) < source.num_blocks):
            reason = "a block is not in the source's pool"
            return [BlocksFailed(fetch.address, fetch.lease_id, fetch.indices, reason)]
        rows = source.rows._replace(ids=there)
        self._reads[self._device.fetch(source.wire, rows, fetch.block_ids)] = source, fetch
        return ()

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchEnd]:
        """Returns the fetches whose copies have ended. Raises DriverError if the device failed."""
        news: list[FetchEnd] = []
        for mark, (source, fetch) in list(self._reads.items()):
            # copies end in order, so later copies have not ended either
            if not self._device.driver.is_done(mark):
                break
            del self._reads[mark]
            if self._sources.get(fetch.address) is source:
                news.append(BlocksArrived(fetch.address, fetch.lease_id, fetch.indices, fetch.word))
        self._unmap_closing()
        return news

    def cancel(self, seq_id: SeqId) -> bool:
        """Returns True while copies of the sequence are queued. Queued copies cannot be stopped."""
        return any(fetch.seq_id == seq_id for _, fetch in self._reads.values())

    def close(self, address: str) -> None:
        """Unmaps the source's memory once no copy reads from it."""
        source = self._sources.pop(address, None)
        if source is not None:
            self._closing.append(source)
            self._unmap_closing()

    def _unmap_closing(self) -> None:
        for source in list(self._closing):
            if not any(read is source for read, _ in self._reads.values()):
                self._closing.remove(source)
                source.unmap()

    def _map(self, use: UseSource) -> _Mapped:
        if self.name is Transport.SHM:
            kept = [map_source(use)]
            return _Mapped(use.wire, rows_of(kept[0]), len(kept[0]), kept.clear)
        offer, source = use.source.offers.ipc, use.source
        if offer is None:
            why = "not_offered" if source.offers.shm is None else None
            raise TransportUnavailable("source offers no memory of a GPU", why)
        if offer.boot_id != boot_id():
            raise TransportUnavailable("source is on another host", None)
        block_bytes = source.identity.record.block_bytes
        if offer.num_bytes != source.num_blocks * block_bytes:
            raise TransportUnavailable("offered size does not match the layout", None)
        driver = self._device.driver
        try:
            address = driver.map(SharedAddress(offer.handle, offer.offset), offer.num_bytes)
        except DriverError as error:
            raise TransportUnavailable(str(error)) from error
        rows = Rows(address, block_bytes)
        return _Mapped(use.wire, rows, source.num_blocks, lambda: driver.unmap(address))
