"""Readers bring blocks of one source here: one reader for each transport.

All of them pass the same contract test:

    shm    copies from the source's mapped memory, before `fetch` returns
    zmq    asks the source to send; the endpoint passes what arrives to `take`
    nixl   reads the source's registered memory; `poll` reports the reads that ended
    ipc    copies from another GPU's memory: `kvtransfer.device.reader`

A fetch may write only the blocks that it names, until its end is reported: at once, in `take`, or
by `poll`. A sink frees blocks only when `is_writing` says that no fetch writes to them.
"""

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from engine.config import Transport
from engine.messages import LeaseId, SeqId
from engine.worker.blocks import BlockId
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.lease.effects import Fetch
from kvtransfer.lease.pull import Means
from kvtransfer.memory import Blocks
from kvtransfer.messages import Data, LeaseWord, Read
from kvtransfer.native.copying import RecordCopier
from kvtransfer.nixl_backend import NixlReader
from kvtransfer.packing import convert_blocks, unpack
from kvtransfer.wire import Wire

FRAME_BYTES = 2 * 2**20  # of one Data: smaller frames cost calls, larger ones exceed the caches
BATCH_BYTES = 8 * 2**20  # of one Fetch
WINDOW_BYTES = 32 * 2**20  # in flight from one source
READ_BYTES = 32 * 2**20  # of one one-sided read, which costs NIXL an exchange with the source


class BlocksArrived(msgspec.Struct, frozen=True):
    """Blocks of a lease that are in place. `sent_by_source`: the lease was open then.

    If the lease's `word` is still the same, it was open too.
    """

    lease_id: LeaseId
    indices: tuple[int, ...]
    sent_by_source: bool = False
    word: LeaseWord | None = None


class BlocksFailed(msgspec.Struct, frozen=True):
    """Blocks of a lease that did not come, and are not written any more."""

    lease_id: LeaseId
    indices: tuple[int, ...]
    reason: str
    damaged: bool = False  # they came with a wrong checksum


FetchNews = BlocksArrived | BlocksFailed


class Reader(Protocol):
    """Fetches blocks of one source into the local pool."""

    means: Means

    def fetch(self, fetch: Fetch) -> Sequence[FetchNews]:
        """Begins to fetch; returns what has ended already."""
        ...

    def poll(self) -> Sequence[FetchNews]:
        """Returns the fetches that ended or failed since the last call."""
        ...

    def cancel(self, seq_id: SeqId) -> None:
        """Stops the fetches of a sequence, as far as possible."""
        ...

    def is_writing(self, seq_id: SeqId) -> bool:
        """True if a fetch of this sequence may still write."""
        ...

    def close(self) -> None:
        """Lets go of the source. Nothing is being written."""
        ...


class ShmReader:
    """Copies from the source's pool, one memcpy a block and piece."""

    def __init__(self, wire: Wire, source: Blocks, local: Blocks) -> None:
        self._wire = wire
        self._source = source
        self._local = local
        pieces = wire.pieces
        self._copier = None if pieces is None else RecordCopier(local, source, pieces)
        batch = num_records(BATCH_BYTES, wire)
        self.means = Means(Transport.SHM, batch_blocks=batch, window_blocks=batch)

    def fetch(self, fetch: Fetch) -> Sequence[FetchNews]:
        """All blocks are in place afterwards."""
        there, here = fetch.source_blocks, fetch.block_ids
        if self._copier is not None:
            self._copier.copy(here, there)
        else:
            convert_blocks(self._wire, self._source, there, self._local, here)
        return [BlocksArrived(fetch.lease_id, fetch.indices, word=fetch.word)]

    def poll(self) -> Sequence[FetchNews]:
        """Returns nothing: `fetch` reports everything."""
        return ()

    def cancel(self, seq_id: SeqId) -> None:
        """Does nothing: no fetch is under way."""

    def is_writing(self, seq_id: SeqId) -> bool:
        """Never outside `fetch`."""
        return False

    def close(self) -> None:
        """Unmaps the source's memory, with the last view of it."""
        del self._source, self._copier


class ZmqReader:
    """Asks the source for blocks. `take` checks what comes and puts it in place."""

    def __init__(
        self, wire: Wire, local: Blocks | DeviceBlocks, send: Callable[[Read], None]
    ) -> None:
        self._wire = wire
        self._local = local
        self._send = send
        self.means = Means(
            Transport.ZMQ,
            batch_blocks=num_records(BATCH_BYTES, wire),
            window_blocks=num_records(WINDOW_BYTES, wire),
            resends=True,
        )

    def fetch(self, fetch: Fetch) -> Sequence[FetchNews]:
        """No block is in place yet."""
        self._send(Read(fetch.lease_id, list(fetch.indices)))
        return ()

    def take(self, data: Data, payload: memoryview, places: Sequence[BlockId | None]) -> FetchNews:
        """Puts records in their places and checks them. None as a place: no pull waits for it.

        Damage is found only after they are in place. The places belong to this pull alone, so
        nothing else is overwritten. Damaged blocks are asked for again, or the pull fails.
        """
        indices = tuple(data.indices)
        damaged = BlocksFailed(data.lease_id, indices, "blocks arrive damaged", damaged=True)
        if payload.nbytes != len(indices) * self._wire.record_bytes:
            return damaged
        rows = [row for row, place in enumerate(places) if place is not None]
        blocks = [place for place in places if place is not None]
        records = np.frombuffer(payload, np.uint8).reshape(len(indices), self._wire.record_bytes)
        if unpack(self._wire, records, rows, self._local, blocks) != data.checksum:
            return damaged
        return BlocksArrived(
            data.lease_id, tuple(indices[row] for row in rows), sent_by_source=True
        )

    def poll(self) -> Sequence[FetchNews]:
        """Returns nothing: `take` reports what comes."""
        return ()

    def cancel(self, seq_id: SeqId) -> None:
        """Does nothing: blocks that still come have no place."""

    def is_writing(self, seq_id: SeqId) -> bool:
        """Never outside `take`."""
        return False

    def close(self) -> None:
        """Does nothing: the connection belongs to the endpoint."""


class OneSidedReader:
    """Reads the source's registered memory over NIXL."""

    def __init__(self, wire: Wire, reader: NixlReader) -> None:
        self._reader = reader
        self._read_ids = itertools.count(secrets.randbits(48))  # different at each sink
        self._reads: dict[int, Fetch] = {}
        self.means = Means(
            Transport.NIXL,
            batch_blocks=num_records(READ_BYTES, wire),
            window_blocks=num_records(2 * READ_BYTES, wire),
        )

    def fetch(self, fetch: Fetch) -> Sequence[FetchNews]:
        """All blocks are in place already if UCX read them at once, as it does on one host."""
        read_id = next(self._read_ids)
        self._reads[read_id] = fetch
        self._reader.fetch(read_id, fetch.source_blocks, fetch.block_ids)
        return self.poll()

    def poll(self) -> Sequence[FetchNews]:
        """Returns the reads that ended or failed."""
        news: list[FetchNews] = []
        for read_id, reason in self._reader.poll() if self._reads else ():
            fetch = self._reads.pop(read_id)
            if reason is None:
                news.append(BlocksArrived(fetch.lease_id, fetch.indices, word=fetch.word))
            else:
                news.append(BlocksFailed(fetch.lease_id, fetch.indices, reason))
        return news

    def cancel(self, seq_id: SeqId) -> None:
        """Asks for the reads of a sequence to stop; `poll` reports their end."""
        for read_id, fetch in self._reads.items():
            if fetch.seq_id == seq_id:
                self._reader.cancel(read_id)

    def is_writing(self, seq_id: SeqId) -> bool:
        """True if a read of this sequence has not ended."""
        return any(fetch.seq_id == seq_id for fetch in self._reads.values())

    @property
    def num_reads(self) -> int:
        """Reads that have not ended."""
        return len(self._reads)

    def close(self) -> None:
        """Forgets the source's memory."""
        self._reader.close()


def num_records(num_bytes: int, wire: Wire) -> int:
    """Returns how many blocks of the wire fit into so many bytes; at least one."""
    return max(1, num_bytes // wire.record_bytes)
