"""The virtual clock of a simulation, and pulls between simulated workers.

The clock is a heap of future events, in order of time. A pull transfers blocks in order, as soon as
they are ready, at the profile's price. The price includes the request once. Pulls share the links
of their source and of their sink: if the busier of both links has n pulls, a pull runs at 1/n of
its full speed. When the last block has arrived, the lease ends, and both sides get an event.

Expiry, loss and other failures are not simulated.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import ceil
from typing import Any, Final, Protocol

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


class Rank:
    """The order of events at the same moment. Ranks are integers, because they are compared often.

    Example: a message that arrives at the end of a step is handled before the next step is planned.
    """

    MESSAGE: Final = 0
    STEP_END: Final = 1
    ROUTINE: Final = 2  # rank of reports and deadlines


class Future:
    """The clock, and a heap of future calls. Calls of equal time and rank run in the order of
    planning.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._num_planned = 0
        self._is_stopped = False

    @property
    def num_events(self) -> int:
        """Returns the number of events that were run, including the current one."""
        return self._num_planned - len(self._heap)

    def plan(self, at_s: float, rank: int, call: Callable[[Any], None], what: Any) -> None:
        """Plans `call(what)` for the current or a future time."""
        self._num_planned += 1
        heappush(self._heap, (at_s, rank, self._num_planned, call, what))

    def run(self) -> None:
        """Runs events in order, until there are no more or `stop` is called."""
        heap, self._is_stopped = self._heap, False
        while heap and not self._is_stopped:
            at_s, _, _, call, what = heappop(heap)
            assert at_s >= self.now_s, "time went back"
            self.now_s = at_s
            call(what)

    def stop(self) -> None:
        """Makes `run` return after the current event."""
        self._is_stopped = True


TRANSPORT = "simulated"
ROUNDING = 1e-6  # tolerated rounding error, as a share of a block


class TransferSide(Protocol):
    """A worker or store that is a source or a sink of transfers."""

    worker_id: WorkerId

    def receive(self, events: list[Event]) -> None:
        """Handles events of its leases and pulls."""
        ...


@dataclass(slots=True)
class _Pull:
    source: TransferSide
    sink: TransferSide
    seq_id: SeqId
    # rising indices of blocks in the lease; None: no pull has started
    wanted: tuple[int, ...] | None = None
    num_asked: int = 0  # number of `wanted` blocks that are in flight or have arrived
    left_s: float = 0.0  # seconds that the blocks in flight still need at full speed
    share: float = 0.0  # share of full speed that the pull has; 0: no block is in flight
    since_s: float = 0.0  # time to which `left_s` refers
    begun_s: float = 0.0  # start time of the current transfer
    transfer_s: float = 0.0  # total seconds with blocks in flight
    ready_s: float = 0.0  # time at which the last block became ready
    ends_s: float = 0.0  # end of the current transfer, as planned last

    def go_on(self, now_s: float) -> None:
        """Updates `left_s` to the current time."""
        self.left_s -= self.share * (now_s - self.since_s)
        self.since_s = now_s


@dataclass(slots=True)
class _Lease:
    source: TransferSide
    num_ready: int = 0
    pull: _Pull | None = None


_Flows = dict[LeaseId, _Pull]


class Transfers:
    """All leases of the cluster, and the pulls that use them."""

    def __init__(
        self, future: Future, cost: PullCost, layout: KVLayout, *, latency_s: float
    ) -> None:
        self._future = future
        self._cost = cost
        self._block_bytes = layout.block_bytes
        self._latency_s = latency_s
        self._leases: dict[LeaseId, _Lease] = {}
        self._held: dict[tuple[WorkerId, SeqId], LeaseId] = {}
        # pulls with blocks in flight, by source and by sink
        self._out: defaultdict[WorkerId, _Flows] = defaultdict(dict)
        self._into: defaultdict[WorkerId, _Flows] = defaultdict(dict)
        self._num_open: Counter[WorkerId] = Counter()

    @property
    def num_leases(self) -> int:
        """Returns the number of open leases."""
        return len(self._leases)

    def num_leases_of(self, source: WorkerId) -> int:
        """Returns the number of open leases of one source."""
        return self._num_open[source]

    def perform(self, side: TransferSide, order: TransferOrder) -> None:
        """Carries out an effect of a side's machine, as a transfer endpoint does."""
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
        """Ends a lease as ordered by its source. The lease's pull fails."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        self._close(lease_id, lease)
        self._notify(lease.source, LeaseEnded(lease_id, "revoked"), 0.0)
        if lease.pull is not None:
            self._fail(lease_id, lease.pull, "revoked", self._latency_s)

    def hold(self, sink: TransferSide, seq_id: SeqId, ref: LeaseRef) -> None:
        """Makes a sink the holder of a lease."""
        lease = self._leases.get(ref.lease_id)
        if lease is None:
            self._notify(sink, PullFailed(seq_id, "unknown"), self._latency_s)
            return
        assert lease.pull is None
        lease.pull = _Pull(lease.source, sink, seq_id)
        self._held[sink.worker_id, seq_id] = ref.lease_id

    def start(self, sink: TransferSide, seq_id: SeqId, indices: tuple[int, ...]) -> None:
        """Starts to pull these blocks of a held lease."""
        lease_id = self._held.get((sink.worker_id, seq_id))
        if lease_id is None:  # the lease has ended, and the sink will be informed
            return
        lease = self._leases[lease_id]
        assert lease.pull is not None
        lease.pull.wanted = indices
        if indices:
            self._go_on(lease_id, lease)
        else:
            self._send(lease_id, lease.pull, self._cost.fixed_s)

    def abort(self, sink: TransferSide, seq_id: SeqId) -> None:
        """Releases a lease that a sink holds."""
        lease_id = self._held.get((sink.worker_id, seq_id))
        if lease_id is None:
            return
        lease = self._leases[lease_id]
        assert lease.pull is not None
        self._close(lease_id, lease)
        self._fail(lease_id, lease.pull, "aborted", 0.0)
        self._notify(lease.source, LeaseEnded(lease_id, "released"), self._latency_s)

    # ------------------------------------------------------------ transfers

    def _go_on(self, lease_id: LeaseId, lease: _Lease) -> None:
        """Sends the blocks that are ready and wanted, but not in flight yet."""
        pull = lease.pull
        if pull is None or not pull.wanted or pull.num_asked == len(pull.wanted):
            return
        num_new = bisect_left(pull.wanted, lease.num_ready) - pull.num_asked
        if num_new <= 0:
            return
        seconds = self._cost.seconds(num_new, num_new * self._block_bytes)
        if pull.num_asked:
            seconds -= self._cost.fixed_s
        pull.num_asked += num_new
        if pull.num_asked == len(pull.wanted):
            pull.ready_s = self._future.now_s
        self._send(lease_id, pull, seconds)

    def _send(self, lease_id: LeaseId, pull: _Pull, seconds: float) -> None:
        """Adds blocks to those in flight. `seconds` is their time at full speed."""
        pull.go_on(self._future.now_s)
        pull.left_s += seconds
        if pull.share:
            self._plan_end(lease_id, pull)
            return
        pull.begun_s = self._future.now_s
        for flows in self._flows_of(pull):
            flows[lease_id] = pull
        self._share(pull)

    def _share(self, changed: _Pull) -> None:
        """Divides the links again, after a pull has begun or ended."""
        out, into = self._flows_of(changed)
        for lease_id, pull in {**out, **into}.items():
            pull.go_on(self._future.now_s)
            pull.share = 1.0 / max(map(len, self._flows_of(pull)))
            self._plan_end(lease_id, pull)

    def _stop(self, lease_id: LeaseId, pull: _Pull) -> None:
        """Removes a pull from its links when it has no more blocks in flight."""
        if not pull.share:
            return
        now_s = self._future.now_s
        pull.go_on(now_s)
        pull.share = 0.0
        pull.transfer_s += now_s - pull.begun_s
        for flows in self._flows_of(pull):
            del flows[lease_id]
        self._share(pull)

    def _flows_of(self, pull: _Pull) -> tuple[_Flows, _Flows]:
        """Returns the pulls in flight from a pull's source, and those to its sink."""
        return self._out[pull.source.worker_id], self._into[pull.sink.worker_id]

    def _arrived(self, pull: _Pull) -> tuple[int, ...]:
        """Returns the indices of the blocks that have arrived."""
        block_s = self._cost.seconds(1, self._block_bytes) - self._cost.fixed_s
        pull.go_on(self._future.now_s)
        num_missing = ceil(pull.left_s / block_s - ROUNDING) if pull.left_s > 0 else 0
        return (pull.wanted or ())[: max(0, pull.num_asked - num_missing)]

    def _close(self, lease_id: LeaseId, lease: _Lease) -> None:
        del self._leases[lease_id]
        self._num_open[lease.source.worker_id] -= 1

    def _plan_end(self, lease_id: LeaseId, pull: _Pull) -> None:
        pull.ends_s = self._future.now_s + max(0.0, pull.left_s) / pull.share
        end = partial(self._on_end, lease_id, pull)
        self._future.plan(pull.ends_s, Rank.MESSAGE, end, pull.ends_s)

    def _on_end(self, lease_id: LeaseId, pull: _Pull, ends_s: float) -> None:
        """Completes the blocks in flight, unless the pull has failed or its planned end has
        changed.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.pull is not pull or not pull.share or pull.ends_s != ends_s:
            return
        pull.left_s, pull.since_s = 0.0, ends_s
        self._stop(lease_id, pull)
        if pull.num_asked == len(pull.wanted or ()):
            self._finish(lease_id, lease, pull)

    def _finish(self, lease_id: LeaseId, lease: _Lease, pull: _Pull) -> None:
        self._close(lease_id, lease)
        del self._held[pull.sink.worker_id, pull.seq_id]
        exposed_s = self._future.now_s - pull.ready_s if pull.wanted else 0.0
        done = PullDone(pull.seq_id, TRANSPORT, pull.transfer_s, exposed_s)
        self._notify(pull.sink, done, 0.0)
        self._notify(lease.source, LeaseEnded(lease_id, "released"), self._latency_s)

    def _fail(self, lease_id: LeaseId, pull: _Pull, reason: str, after_s: float) -> None:
        del self._held[pull.sink.worker_id, pull.seq_id]
        arrived = self._arrived(pull)
        self._stop(lease_id, pull)
        self._notify(pull.sink, PullFailed(pull.seq_id, reason, arrived), after_s)

    def _notify(self, side: TransferSide, event: Event, after_s: float) -> None:
        call: Callable[[list[Event]], None] = side.receive
        self._future.plan(self._future.now_s + after_s, Rank.MESSAGE, call, [event])
