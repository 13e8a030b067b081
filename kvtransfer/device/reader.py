"""Copies blocks of a source's memory, which is mapped here, to a pool in a device's memory."""

from collections.abc import Callable, Sequence

from engine.config import Transport
from engine.messages import SeqId
from kvtransfer.device.blocks import DeviceBlocks, Rows
from kvtransfer.lease.effects import Fetch
from kvtransfer.lease.pull import Means
from kvtransfer.readers import READ_BYTES, BlocksArrived, BlocksFailed, FetchNews, num_records
from kvtransfer.wire import Wire


class CopyReader:
    """A `Reader` of memory on this host: another GPU's, or shared memory of a store.

    Copies are queued by `fetch`; `poll` asks the device which copies have ended. `source` is the
    mapped pool, and `num_blocks` its size. `let_go` unmaps it.
    """

    def __init__(
        self,
        wire: Wire,
        pool: DeviceBlocks,
        source: Rows,
        num_blocks: int,
        *,
        transport: Transport,
        let_go: Callable[[], None],
    ) -> None:
        self._wire = wire
        self._pool = pool
        self._source = source
        self._num_blocks = num_blocks
        self._let_go = let_go
        self._reads: dict[int, Fetch] = {}  # by the mark of their end, oldest first
        self.means = Means(
            transport,
            batch_blocks=num_records(READ_BYTES, wire),
            window_blocks=num_records(2 * READ_BYTES, wire),
        )

    def fetch(self, fetch: Fetch) -> Sequence[FetchNews]:
        """No block is in place yet."""
        there = fetch.source_blocks
        if not (min(there) >= 0 and max(there) < self._num_blocks):
            reason = "a block is not in the source's pool"
            return [BlocksFailed(fetch.lease_id, fetch.indices, reason)]
        source = self._source._replace(ids=there)
        self._reads[self._pool.fetch(self._wire, source, fetch.block_ids)] = fetch
        return ()

    def poll(self) -> Sequence[FetchNews]:
        """Returns the copies that ended. Raises DriverError if the device failed."""
        news: list[FetchNews] = []
        for mark, fetch in list(self._reads.items()):
            if not self._pool.driver.is_done(mark):  # later ones have not ended either
                break
            del self._reads[mark]
            news.append(BlocksArrived(fetch.lease_id, fetch.indices, word=fetch.word))
        return news

    def cancel(self, seq_id: SeqId) -> None:
        """Does nothing: queued copies end soon."""

    def is_writing(self, seq_id: SeqId) -> bool:
        """True if copies of this sequence have not ended."""
        return any(fetch.seq_id == seq_id for fetch in self._reads.values())

    @property
    def num_reads(self) -> int:
        """Fetches whose copies have not ended."""
        return len(self._reads)

    def close(self) -> None:
        """Unmaps the source's memory."""
        self._let_go()
