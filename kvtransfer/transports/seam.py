"""The interface between the lease protocol and the transports that move blocks.

An endpoint has one object of each transport, for all its sources:

    shm      copies from a source's mapped memory, before `fetch` returns
    ipc      copies from another GPU's memory, or from mapped memory to a GPU
    nixl     reads a source's registered memory
    zmq      asks the source to send, and receives the blocks in messages
    sealed   sends and receives the same messages over encrypted streams, beside zmq

All transports pass the same contract test. A fetch may write only to the blocks that it names, and
only until its end is reported. A sink frees the blocks of a failed pull only after `cancel` has
returned False: no fetch of the pull can write any more.
"""

import select
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from engine.clock import Clock
from engine.config import Transport
from engine.errors import BatonError, ProtocolError
from engine.messages import LeaseId, SeqId
from engine.net.trust import Secret
from kvtransfer.lease.effects import Fetch, Timing, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.messages import Data, LeaseWord, Offers
from kvtransfer.wire import Wire

# bytes in one Data: smaller frames need more calls, larger ones exceed the processor's caches
FRAME_BYTES = 2 * 2**20
BATCH_BYTES = 8 * 2**20  # largest number of bytes in one Fetch
WINDOW_BYTES = 32 * 2**20  # most bytes in flight from one source
# most bytes in a one-sided read; each read costs NIXL a round trip to the source
READ_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class TransferContext:
    """The objects that all parts of one endpoint share."""

    sockets: "zmq.Context[zmq.Socket[bytes]]"
    poller: select.epoll  # watches the descriptors of all parts of the endpoint
    secret: Secret
    timing: Timing
    clock: Clock
    count: Callable[[str, float], None]  # adds an amount to the counter with that name


class TransportUnavailable(BatonError):
    """A transport cannot be used on this host, or with one source; the message says why.

    `fallback` is the counter for this case; None if the case is expected.
    """

    def __init__(self, message: str, fallback: str | None = "unavailable") -> None:
        super().__init__(message)
        self.fallback = fallback


class BlocksArrived(msgspec.Struct, frozen=True):
    """Blocks of a lease that have arrived in their places.

    With `data`, the source sent the blocks while the lease was open. Without `data`, the lease was
    open if its `word` has not changed.
    """

    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]
    word: LeaseWord | None = None
    data: Data | None = None


class BlocksFailed(msgspec.Struct, frozen=True):
    """Blocks of a lease whose fetch failed. Nothing writes to them any more."""

    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]
    reason: str
    damaged: bool = False  # True if the blocks had a wrong checksum


class SourceFault(msgspec.Struct, frozen=True):
    """A source violated the protocol."""

    address: str
    error: ProtocolError


FetchEnd = BlocksArrived | BlocksFailed | SourceFault


class BlockTransport(Protocol):
    """A transport of blocks, used for all sources whose blocks it fetches."""

    @property
    def name(self) -> Transport:
        """The transport's name in settings and reports."""
        ...

    @property
    def num_reads(self) -> int:
        """The number of fetches in flight whose end is found only by `poll`, not reported by a
        descriptor.
        """
        ...

    def offer(self, offers: Offers) -> Offers:
        """Adds to `offers` how this transport can read the pool. Raises TransportUnavailable."""
        ...

    def open(self, use: UseSource) -> Means:
        """Prepares to fetch blocks of a source. Raises TransportUnavailable."""
        ...

    def fetch(self, fetch: Fetch) -> Sequence[FetchEnd]:
        """Starts a fetch. Returns the fetches that have ended already."""
        ...

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchEnd]:
        """Returns the fetches that ended or failed since the last call.

        `ready` are the descriptors that can be read or written. With `may_wait`, this waits briefly
        for the rest of a partly received frame.
        """
        ...

    def cancel(self, seq_id: SeqId) -> bool:
        """Stops the fetches of a sequence if possible. Returns True while a fetch may still
        write.
        """
        ...

    def close(self, address: str) -> None:
        """Drops a source, at the latest once the last fetch from the source has ended."""
        ...


def num_records(num_bytes: int, wire: Wire) -> int:
    """Returns the number of wire records that fit into `num_bytes`, at least one."""
    return max(1, num_bytes // wire.record_bytes)
