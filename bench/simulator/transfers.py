"""Leases and pulls between simulated workers, and when pulled blocks arrive.

A pull takes blocks in order, as they become ready. All blocks that are ready together go as one
transfer, at the profile's price. The first transfer of a pull pays for the request too. A transfer
occupies the whole link of its source and of its sink, first come first served. When the last block
has arrived the lease ends, and both sides are told.

Expiry, loss and other failures are not modelled.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bench.simulator.clock import Future, Rank
from engine.layout import KVLayout
from engine.messages import LeaseId, LeaseRef, SeqId, WorkerId
from engine.worker.costs import PullCost
from engine.worker.events import (
    AbortPull,
    Event,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
    TransferOrder,
)

TRANSPORT = "simulated"


class TransferSide(Protocol):
    """A worker as a source or a sink of transfers."""

    worker_id: WorkerId

    def receive(self, events: list[Event]) -> None:
        """Takes events of its leases and pulls."""
        ...


@dataclass(slots=True)
class _Link:
    out_free_s: float = 0.0
    in_free_s: float = 0.0


@dataclass(slots=True)
class _Pull:
    sink: TransferSide
    seq_id: SeqId
    # rising indices in the lease; None: the lease is only held
    wanted: tuple[int, ...] | None = None
    num_asked: int = 0  # of `wanted`: on their way or arrived
    ends_s: float = 0.0  # when the last requested transfer arrives
    transfer_s: float = 0.0
    ready_s: float = 0.0  # when the last block became ready
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, how many by then)

    def arrived(self, now_s: float) -> tuple[int, ...]:
        """Returns the indices of the blocks that have arrived."""
        here = max((count for at_s, count in self.arrivals if at_s <= now_s), default=0)
        return (self.wanted or ())[:here]


@dataclass(slots=True)
class _Lease:
    source: TransferSide
    num_ready: int = 0
    pull: _Pull | None = None


class Transfers:
    """All leases of the cluster."""

    def __init__(
        self, future: Future, cost: PullCost, layout: KVLayout, *, latency_s: float
    ) -> None:
        self._future = future
        self._cost = cost
        self._block_bytes = layout.block_bytes
        self._latency_s = latency_s
        self._leases: dict[LeaseId, _Lease] = {}
        self._held: dict[tuple[WorkerId, SeqId], LeaseId] = {}
        self._links: dict[WorkerId, _Link] = {}
        self._num_open: Counter[WorkerId] = Counter()

    @property
    def num_leases(self) -> int:
        """Open leases."""
        return len(self._leases)

    def num_leases_of(self, source: WorkerId) -> int:
        """Returns the number of open leases of one source."""
        return self._num_open[source]

    def perform(self, side: TransferSide, order: TransferOrder) -> None:
        """Performs an order of a side's machine, as a transfer endpoint does."""
        match order:
            case OpenLease(lease_id):
                self.open(side, lease_id)
            case GrowLease(lease_id, block_ids):
                self.grow(lease_id, len(block_ids))
            case RevokeLease(lease_id):
                self.revoke(lease_id)
            case HoldLease(seq_id, lease):
                self.hold(side, seq_id, lease)
            case StartPull(seq_id, blocks):
                self.start(side, seq_id, tuple(index for index, _ in blocks))
            case AbortPull(seq_id):
                self.abort(side, seq_id)

    def open(self, source: TransferSide, lease_id: LeaseId) -> None:
        """Opens a lease at a source."""
        assert lease_id not in self._leases
        self._leases[lease_id] = _Lease(source)
        self._num_open[source.worker_id] += 1

    def grow(self, lease_id: LeaseId, num_blocks: int) -> None:
        """Marks more blocks of a lease as ready."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        lease.num_ready += num_blocks
        self._go_on(lease_id, lease)

    def revoke(self, lease_id: LeaseId) -> None:
        """Ends a lease on the source's order, and fails its pull."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        self._close(lease_id, lease)
        self._tell(lease.source, LeaseEnded(lease_id, "revoked"), 0.0)
        if lease.pull is not None:
            self._fail(lease.pull, "revoked", self._latency_s)

    def hold(self, sink: TransferSide, seq_id: SeqId, ref: LeaseRef) -> None:
        """Claims a lease for a sink."""
        lease = self._leases.get(ref.lease_id)
        if lease is None:
            self._tell(sink, PullFailed(seq_id, "unknown"), self._latency_s)
            return
        assert lease.pull is None
        lease.pull = _Pull(sink, seq_id)
        self._held[sink.worker_id, seq_id] = ref.lease_id

    def start(self, sink: TransferSide, seq_id: SeqId, indices: tuple[int, ...]) -> None:
        """Starts the pull of these blocks of a held lease."""
        lease_id = self._held.get((sink.worker_id, seq_id))
        if lease_id is None:  # it has ended, and the sink will hear of that
            return
        lease = self._leases[lease_id]
        assert lease.pull is not None
        lease.pull.wanted = indices
        if indices:
            self._go_on(lease_id, lease)
        else:
            self._plan_end(lease_id, lease.pull, self._cost.fixed_s)

    def abort(self, sink: TransferSide, seq_id: SeqId) -> None:
        """Gives up a lease that a sink holds."""
        lease_id = self._held.get((sink.worker_id, seq_id))
        if lease_id is None:
            return
        lease = self._leases[lease_id]
        assert lease.pull is not None
        self._close(lease_id, lease)
        self._fail(lease.pull, "aborted", 0.0)
        self._tell(lease.source, LeaseEnded(lease_id, "released"), self._latency_s)

    # ------------------------------------------------------------ transfers

    def _go_on(self, lease_id: LeaseId, lease: _Lease) -> None:
        """Sends the blocks that are ready and wanted and not yet on their way."""
        pull = lease.pull
        if pull is None or not pull.wanted or pull.num_asked == len(pull.wanted):
            return
        num_new = bisect_left(pull.wanted, lease.num_ready) - pull.num_asked
        if num_new <= 0:
            return
        now_s = self._future.now_s
        out, into = self._link(lease.source), self._link(pull.sink)
        seconds = self._cost.seconds(num_new, num_new * self._block_bytes)
        if pull.num_asked:
            seconds -= self._cost.fixed_s
        begins_s = max(now_s, out.out_free_s, into.in_free_s, pull.ends_s)
        pull.ends_s = out.out_free_s = into.in_free_s = begins_s + seconds
        pull.num_asked += num_new
        pull.transfer_s += seconds
        pull.arrivals.append((pull.ends_s, pull.num_asked))
        if pull.num_asked == len(pull.wanted):
            pull.ready_s = now_s
            self._plan_end(lease_id, pull, pull.ends_s - now_s)

    def _close(self, lease_id: LeaseId, lease: _Lease) -> None:
        del self._leases[lease_id]
        self._num_open[lease.source.worker_id] -= 1

    def _link(self, side: TransferSide) -> _Link:
        link = self._links.get(side.worker_id)
        if link is None:
            link = self._links[side.worker_id] = _Link()
        return link

    def _plan_end(self, lease_id: LeaseId, pull: _Pull, after_s: float) -> None:
        at_s = self._future.now_s + after_s
        self._future.plan(at_s, Rank.MESSAGE, partial(self._on_end, lease_id), pull)

    def _on_end(self, lease_id: LeaseId, pull: _Pull) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.pull is not pull:
            return  # the pull has failed
        self._close(lease_id, lease)
        del self._held[pull.sink.worker_id, pull.seq_id]
        exposed_s = self._future.now_s - pull.ready_s if pull.wanted else 0.0
        done = PullDone(pull.seq_id, TRANSPORT, pull.transfer_s, exposed_s)
        self._tell(pull.sink, done, 0.0)
        self._tell(lease.source, LeaseEnded(lease_id, "released"), self._latency_s)

    def _fail(self, pull: _Pull, reason: str, after_s: float) -> None:
        del self._held[pull.sink.worker_id, pull.seq_id]
        arrived = pull.arrived(self._future.now_s)
        self._tell(pull.sink, PullFailed(pull.seq_id, reason, arrived), after_s)

    def _tell(self, side: TransferSide, event: Event, after_s: float) -> None:
        call: Callable[[list[Event]], None] = side.receive
        self._future.plan(self._future.now_s + after_s, Rank.MESSAGE, call, [event])
