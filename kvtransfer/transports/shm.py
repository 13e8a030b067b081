"""Copies blocks from the mapped memory of sources on this host."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from engine.config import Transport
from engine.messages import SeqId
from kvtransfer.lease.effects import Fetch, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.memory import Blocks, Pool, ShmUnavailable, map_offer
from kvtransfer.messages import Offers
from kvtransfer.native.copying import RecordCopier
from kvtransfer.packing import convert_blocks
from kvtransfer.transports.seam import (
    BATCH_BYTES,
    BlocksArrived,
    FetchEnd,
    TransportUnavailable,
    num_records,
)

# (local block ids, ids of the source's blocks)
Copy = Callable[[Sequence[int], Sequence[int]], None]


class ShmTransport:
    """Copies blocks piece by piece. A fetch has ended when `fetch` returns."""

    name = Transport.SHM
    num_reads = 0

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # by the source's address; each copy keeps the source's memory mapped
        self._copies: dict[str, Copy] = {}

    def offer(self, offers: Offers) -> Offers:
        """Offers the pool's memory, if other processes can map the pool."""
        return msgspec.structs.replace(offers, shm=self._pool.offer())

    def open(self, use: UseSource) -> Means:
        """Maps the source's pool. Raises TransportUnavailable."""
        pool, wire = self._pool.blocks, use.wire
        if pool is None:
            raise TransportUnavailable("KV here is in a GPU's memory", None)
        source = map_source(use)
        if wire.pieces is not None:
            self._copies[use.address] = RecordCopier(pool, source, wire.pieces).copy
        else:
            self._copies[use.address] = partial(convert_blocks, wire, pool, source)
        batch = num_records(BATCH_BYTES, wire)
        return Means(self.name, batch_blocks=batch, window_blocks=batch)

    def fetch(self, fetch: Fetch) -> Sequence[FetchEnd]:
        """Copies all blocks of the fetch before it returns."""
        self._copies[fetch.address](fetch.block_ids, fetch.source_blocks)
        return [BlocksArrived(fetch.address, fetch.lease_id, fetch.indices, fetch.word)]

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchEnd]:
        """Returns nothing, because `fetch` reports the end of each fetch itself."""
        return ()

    def cancel(self, seq_id: SeqId) -> bool:
        """Returns False: no fetch is ever in flight."""
        return False

    def close(self, address: str) -> None:
        """Drops the copy function of a source. The source's memory is unmapped with its last
        view.
        """
        self._copies.pop(address, None)


def map_source(use: UseSource) -> Blocks:
    """Maps a source's pool, read-only. Raises TransportUnavailable."""
    offers = use.source.offers
    if offers.shm is None:
        has_no_such_memory = offers.ipc is not None
        why = None if has_no_such_memory else "not_offered"
        raise TransportUnavailable("source offers no shared memory", why)
    try:
        block_bytes = use.source.identity.record.block_bytes
        return map_offer(offers.shm, use.source.num_blocks, block_bytes)
    except ShmUnavailable as error:
        raise TransportUnavailable(str(error)) from error
