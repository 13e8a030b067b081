"""The seam between the lease protocol and the transports that move blocks.

An endpoint has one object of each transport, for all its sources:

    shm      copies from a source's mapped memory, before `fetch` returns
    ipc      copies from another GPU's memory, or from mapped memory to a GPU
    nixl     reads a source's registered memory
    zmq      asks the source to send, and takes what its messages bring
    sealed   carries the same over encrypted streams, beside zmq

All of them pass the same contract test. A fetch may write only the blocks that it names, and only
until its end is reported. A sink frees blocks of a failed pull only once `cancel` says that no
fetch of the pull can write any more.
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
from kvtransfer.lease.effects import Fetch, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.lease.terms import Timing
from kvtransfer.messages import Data, LeaseWord, Offers
from kvtransfer.wire import Wire

FRAME_BYTES = 2 * 2**20  # in one Data: smaller frames cost calls, larger ones exceed the caches
BATCH_BYTES = 8 * 2**20  # in one Fetch
WINDOW_BYTES = 32 * 2**20  # in flight from one source
READ_BYTES = 32 * 2**20  # in one one-sided read, which costs NIXL an exchange with the source


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What all parts of one endpoint share."""

    sockets: "zmq.Context[zmq.Socket[bytes]]"
    poller: select.epoll  # watches the descriptors of all parts
    secret: Secret
    timing: Timing
    clock: Clock
    count: Callable[[str, float], None]  # adds to a counter


class TransportUnavailable(BatonError):
    """A transport cannot be used here, or not with a source; the message says why.

    `fallback` names the counter of such a fallback; None if it is as it should be.
    """

    def __init__(self, message: str, fallback: str | None = "unavailable") -> None:
        super().__init__(message)
        self.fallback = fallback


class BlocksArrived(msgspec.Struct, frozen=True):
    """Blocks of a lease that are in place.

    With `data`, the source sent them while the lease was open. Otherwise the lease was open if its
    `word` is still the same.
    """

    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]
    word: LeaseWord | None = None
    data: Data | None = None


class BlocksFailed(msgspec.Struct, frozen=True):
    """Blocks of a lease that did not come, and are not written any more."""

    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]
    reason: str
    damaged: bool = False  # they came with a wrong checksum


class SourceFault(msgspec.Struct, frozen=True):
    """A source sent what no source may send."""

    address: str
    error: ProtocolError


FetchNews = BlocksArrived | BlocksFailed | SourceFault


class BlockTransport(Protocol):
    """One way in which blocks move, with all sources that are read in this way."""

    @property
    def name(self) -> Transport:
        """The transport as settings and reports name it."""
        ...

    @property
    def num_reads(self) -> int:
        """Fetches under way whose end no descriptor reports, so that `poll` must find it."""
        ...

    def offer(self, offers: Offers) -> Offers:
        """Returns `offers` and what others need to read this pool. Raises TransportUnavailable."""
        ...

    def open(self, use: UseSource) -> Means:
        """Prepares to fetch blocks of a source. Raises TransportUnavailable."""
        ...

    def fetch(self, fetch: Fetch) -> Sequence[FetchNews]:
        """Begins to fetch; returns the fetches that have ended already."""
        ...

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchNews]:
        """Returns the fetches that ended or failed since the last call.

        `ready` are the descriptors that can be read or written. `may_wait`, for a moment, for more
        of what has begun to come.
        """
        ...

    def cancel(self, seq_id: SeqId) -> bool:
        """Stops the fetches of a sequence, as far as possible. True while one may still write."""
        ...

    def close(self, address: str) -> None:
        """Lets go of a source, at the latest when the last fetch from it has ended."""
        ...


def num_records(num_bytes: int, wire: Wire) -> int:
    """Returns how many blocks of the wire fit into `num_bytes`; at least one."""
    return max(1, num_bytes // wire.record_bytes)
