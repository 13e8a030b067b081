"""Reads blocks from a source's registered memory with NIXL: READ over UCX.

An endpoint has two NIXL agents:

    serving    other endpoints read from this agent. UCX runs on its thread, which sleeps when idle
    pulling    reads for this endpoint. It has no thread, so UCX runs only in `fetch` and `poll`.
               Over cma and tcp, memory is also written only then

Findings with nixl 1.5.1 on a 2-core host, with its UCX backend and the UCX that it includes:

* A source whose agent makes no progress stalls its sinks, over cma too: connections and flushes
  need an answer. NIXL's progress thread takes a whole core, because through the Python API it
  polls without delay. With a delay the thread sleeps on UCX's events: an idle agent takes under 1 %
  of a core, and a block arrives in 14 to 40 us, as from a source that polls. Hence `serving`.
* READ of scattered blocks over cma, GiB/s in reads of 64 blocks: 2.4 (16 KiB), 3.1 (64 KiB), 3.8
  (1 MiB); with all 64 MiB in one read 2.7, 3.5, 3.8. Such a read is done when `fetch` returns.
  READ over tcp reaches 1.0 to 1.5 GiB/s, less than ZeroMQ. RNDV_THRESH does not matter: NIXL sets
  it to inf.
* tcp is excluded. Over tcp, UCX emulates READ with messages of the source. If a sink is killed
  during a read, the SOURCE's process aborts ("ucp_request.inl: unexpected error"), with any error
  handling. Over cma, and over shared memory without cma, a source survived the loss of every sink.
  So without RDMA a source on another host is unreachable, and `connect` reports that. UCX_TLS in
  the environment overrides this.
* Error handling `peer` needs tcp or RDMA underneath. Without RDMA the mode is `none`. Then a
  connection costs less (14 us per block, not 35). A killed source is detected at the next read,
  within milliseconds. A stopped source can still be read.
* Releasing a READ in flight cancels nothing: over tcp, 58 of 64 MiB were written after the READ was
  released and its source removed. Writing stops only when the read is DONE, or when the agent is
  destroyed with its sockets and queue pairs. So if a read fails, or is cancelled and does not end
  within `CANCEL_GRACE_S`, the pulling agent is replaced. That takes 20 ms and a new registration of
  the region. All reads in flight fail, including reads from other sources.
* Strided descriptors are as fast as a list of all blocks, and their size does not grow. The
  transport reaches 0.96 to 0.99 of the speed of bare NIXL with the same descriptors.
* NIXL rejects damaged metadata with an error. Nevertheless, metadata are accepted only from
  authenticated sources.
* Closing frees threads, files and memory. A forked child must not use an agent (UCX); a spawned
  process may.

Not measured: RDMA and GPU memory. The region is registered once for each of the two agents; with
RDMA the pool should be in huge pages.

Sources: NIXL, src/plugins/ucx/ucx_backend.cpp (`release`, `nixlUcxSharedThread`) and ucx_utils.cpp.
"""

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.clock import Clock, MonotonicClock
from engine.config import Transport
from engine.messages import SeqId
from kvtransfer.lease.effects import Fetch, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.memory import Region
from kvtransfer.messages import NixlOffer, Offers
from kvtransfer.transports.nixl_agent import (
    NixlAgent,
    NixlLink,
    NixlRecords,
    check_offer,
)
from kvtransfer.transports.seam import (
    READ_BYTES,
    BlocksArrived,
    BlocksFailed,
    FetchEnd,
    TransportUnavailable,
    num_records,
)

log = logging.getLogger(__name__)

PROGRESS_DELAY_US = 10_000  # longest sleep of the serving thread, in case UCX fails to wake it
CANCEL_GRACE_S = 0.5
READ_ID_BYTES = 8


@dataclass(eq=False, slots=True)
class _Source:
    offer: NixlOffer
    there: NixlRecords
    here: NixlRecords
    link: NixlLink | None = None  # None after the agent was replaced, until the next read


@dataclass(slots=True)
class _Read:
    fetch: Fetch
    source: _Source
    # NIXL's handle of the read; None once released, after which the agent is destroyed
    handle: Any = None
    cancelled_s: float | None = None


class NixlTransport:
    """Reads into this endpoint's pool and offers the pool to others. Not thread-safe."""

    name = Transport.NIXL

    def __init__(
        self,
        name: str,
        region: Region,
        *,
        record_bytes: int,
        count: Callable[[str, float], None],
        clock: Clock | None = None,
    ) -> None:
        """`name` must differ from all agents' names, also earlier ones; it must name the
        process.
        """
        assert region.num_bytes % record_bytes == 0
        self._record_bytes = record_bytes
        self._num_blocks = region.num_bytes // record_bytes
        self._clock = clock or MonotonicClock()
        self._count = count
        self._name = name
        self._region = region
        self._serving: NixlAgent | None = None
        self._pulling: NixlAgent | None = None
        self._sources: dict[str, _Source] = {}  # sources by address
        self._closing: list[_Source] = []  # closed sources whose reads have not ended
        # starts at a random number, so that the ids of different sinks differ
        self._read_ids = itertools.count(secrets.randbits(48))
        self._reads: dict[int, _Read] = {}
        self._ended: list[FetchEnd] = []
        self.num_restarts = 0

    @property
    def num_reads(self) -> int:
        """The number of reads that have not ended."""
        return len(self._reads)

    def offer(self, offers: Offers) -> Offers:
        """Creates both agents, registers the region and offers it. Raises TransportUnavailable."""
        try:
            self._serving = NixlAgent(self._name, self._region, delay_us=PROGRESS_DELAY_US)
            self._open_pulling()
        except TransportUnavailable:
            self.stop()
            raise
        metadata, region = bytes(self._serving.nixl.get_agent_metadata()), self._region
        place = region.address, region.num_bytes, region.kind, region.device_id
        return msgspec.structs.replace(offers, nixl=NixlOffer(self._name, metadata, *place))

    def open(self, use: UseSource) -> Means:
        """Makes the source known to the pulling agent. Raises TransportUnavailable."""
        offer, pieces = use.source.offers.nixl, use.wire.pieces
        if self._serving is None:
            raise TransportUnavailable("NIXL cannot be used here", None)
        if offer is None:
            raise TransportUnavailable("source is not on NIXL", "not_offered")
        if pieces is None:
            why = "KV formats differ, and a one-sided read converts nothing"
            raise TransportUnavailable(why, "formats_differ")
        record_bytes = use.source.identity.record.block_bytes
        there = NixlRecords(use.source.num_blocks, record_bytes, tuple(pieces))
        here = NixlRecords(self._num_blocks, self._record_bytes, tuple(pieces))
        source = _Source(offer, there, here)
        check_offer(offer, there, self._record_bytes)
        if any(other.offer.agent == offer.agent for other in self._known()):
            raise TransportUnavailable(f"agent {offer.agent} is connected already")
        self._connect(source)
        self._sources[use.address] = source
        return Means(
            self.name,
            batch_blocks=num_records(READ_BYTES, use.wire),
            window_blocks=num_records(2 * READ_BYTES, use.wire),
        )

    def fetch(self, fetch: Fetch) -> Sequence[FetchEnd]:
        """Starts a read. NIXL notifies the source at the end of the read.

        If UCX finishes the read at once, which is usual within a host, the result contains all
        blocks. Raises IndexError, before anything is read, for a block outside its pool.
        """
        source = self._sources[fetch.address]
        there = source.there.indices(fetch.source_blocks)
        here = source.here.indices(fetch.block_ids)
        read_id, read = next(self._read_ids), _Read(fetch, source)
        try:
            link = source.link or self._connect(source)
        except TransportUnavailable as error:
            self._report(read, str(error))
            return self._news()
        self._reads[read_id] = read
        try:
            read.handle = link.prepare(here, there)
            state = link.nixl.transfer(read.handle, read_id.to_bytes(READ_ID_BYTES, "little"))
            if state == "ERR":
                self._restart("a read failed")
            elif state == "DONE":
                self._end(read_id, read)
        except link.errors as error:
            # some of the failed read may still be in flight
            self._restart(f"a read failed: {error}")
        return self._news()

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchEnd]:
        """Returns the reads that have ended or failed. These reads write no more."""
        failure = None
        for read_id, read in list(self._reads.items()):
            failure = self._advance(read_id, read) or failure
        if failure is not None:
            self._restart(failure)
        for source in list(self._closing):
            self._drop_if_unread(source)
        # discards the notifications that other endpoints have finished their reads
        if self._serving is not None:
            notified = self._serving.nixl.get_new_notifs().values()
            self._count("served_reads", sum(map(len, notified)))
        return self._news()

    def cancel(self, seq_id: SeqId) -> bool:
        """Cancels the reads of a sequence. Returns True while one of them may still write."""
        reads = [read for read in self._reads.values() if read.fetch.seq_id == seq_id]
        for read in reads:
            if read.cancelled_s is None:
                read.cancelled_s = self._clock.now_s()
        return bool(reads)

    def close(self, address: str) -> None:
        """Removes the source once all reads from it have ended."""
        source = self._sources.pop(address, None)
        if source is not None:
            self._closing.append(source)
            self._drop_if_unread(source)

    def stop(self) -> None:
        """Ends all reads and deregisters the region. After this, no read writes to the region any
        more.
        """
        self._close_pulling("endpoint closed")
        self._sources.clear()
        self._closing.clear()
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    # ------------------------------------------------------------ reads

    def _advance(self, read_id: int, read: _Read) -> str | None:
        """Checks one read. Returns a reason if the pulling agent must be replaced, else None."""
        link = read.source.link
        assert link is not None
        try:
            state = link.nixl.check_xfer_state(read.handle)
        except link.errors as error:
            return f"a read failed: {error}"
        if state == "ERR":
            return "a read failed"
        if state == "DONE":
            self._end(read_id, read)
            return None
        late_s = math.inf if read.cancelled_s is None else read.cancelled_s + CANCEL_GRACE_S
        return "a cancelled read does not end" if self._clock.now_s() >= late_s else None

    def _end(self, read_id: int, read: _Read) -> None:
        read.handle.release()
        del self._reads[read_id]
        self._report(read, None if read.cancelled_s is None else "cancelled")

    def _report(self, read: _Read, failure: str | None) -> None:
        """Adds the end of a read to the news, unless its source is closed."""
        fetch = read.fetch
        if self._sources.get(fetch.address) is not read.source:
            return
        what = fetch.address, fetch.lease_id, fetch.indices
        if failure is None:
            self._ended.append(BlocksArrived(*what, fetch.word))
        else:
            self._ended.append(BlocksFailed(*what, failure))

    def _news(self) -> Sequence[FetchEnd]:
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------ sources, and the pulling agent

    def _known(self) -> list[_Source]:
        return [*self._sources.values(), *self._closing]

    def _connect(self, source: _Source) -> NixlLink:
        """Returns the link to a source. Connects if necessary. Raises TransportUnavailable."""
        if self._pulling is None:
            self._open_pulling()
        assert self._pulling is not None
        source.link = NixlLink(self._pulling, source.offer, here=source.here, there=source.there)
        return source.link

    def _drop_if_unread(self, source: _Source) -> None:
        if not any(read.source is source for read in self._reads.values()):
            self._closing.remove(source)
            if source.link is not None:
                source.link.close()

    def _open_pulling(self) -> None:
        # The name is different each time, so that a source does not confuse the new agent with the
        # old one.
        name = f"{self._name}.pull{self.num_restarts}"
        self._pulling = NixlAgent(name, self._region, delay_us=None)

    def _restart(self, reason: str) -> None:
        """Fails all reads in flight, and replaces the agent, so that no earlier read writes any
        more.
        """
        log.warning("restarting reads over NIXL: %s", reason)
        self.num_restarts += 1
        self._close_pulling(reason)

    def _close_pulling(self, reason: str) -> None:
        for read in self._reads.values():
            if read.handle is not None:
                read.handle.release()
        for source in self._known():
            if source.link is not None:
                source.link.close()
                source.link = None
        if self._pulling is not None:
            self._pulling.close()
            self._pulling = None
        reads, self._reads = self._reads, {}
        for read in reads.values():
            self._report(read, reason)
