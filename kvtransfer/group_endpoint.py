"""The transfer endpoint of a worker of several ranks, at rank 0.

Each rank has a `TransferEndpoint` for its own pool and share of the model. The `GroupEndpoint`
gives each order to all these endpoints. The `GroupEndpoint` reports the end of a pull or lease once
every rank has reported the end of its part: see `kvtransfer.lease.group`. It has the interface of a
`TransferEndpoint`, so a worker's core does not depend on the number of ranks.

Orders come from one thread, and reports from other threads. All orders and reports are appended to
one queue. A thread that appends an entry handles the whole queue, unless another thread is already
doing so. So a thread with a report never waits for a thread that sends orders, and two full pipes
cannot block each other.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from engine.clock import Clock
from engine.messages import RankAddress, TransferAddress
from engine.worker.events import (
    AbortPull,
    Event,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    RevokeLease,
    StartPull,
    TransferOrder,
    TransferReport,
)
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint, counts_of
from kvtransfer.lease.group import GroupEffect, LeaseGroups, PullGroups, ToMember
from kvtransfer.memory import Pool

log = logging.getLogger(__name__)

RANK_DIED = "rank died"  # reason for the end of pulls and leases in which a dead rank took part
# These counters count whole pulls and leases. The ranks' own counters count parts of pulls and
# leases.
COUNTED_WHOLE = frozenset(
    ("pulls_done", "pulls_failed", "transfer_seconds", "exposed_seconds", "leases_ended")
)


class RemoteEndpoint(Protocol):
    """The transfer endpoint of another rank, in another process."""

    def open(
        self, on_report: Callable[[TransferReport], None], on_lost: Callable[[], None]
    ) -> TransferAddress:
        """Opens the endpoint. Returns the address of its rank.

        From now on the endpoint calls `on_report` for each report, in order, on any thread that is
        not in `perform`. If the rank is lost, the endpoint calls `on_lost` once, and `on_report`
        never again.
        """
        ...

    def perform(self, order: TransferOrder) -> None:
        """Sends an order after all earlier orders. Does nothing if the rank is lost."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Returns the latest counters that the endpoint has reported."""
        ...

    def close(self) -> None:
        """Closes the endpoint of the other rank."""
        ...


class GroupEndpoint:
    """Leases out the blocks of all ranks of a worker, and pulls blocks into all ranks' pools."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        pool: Pool,
        clock: Clock,
        on_event: Callable[[Event], None],
        on_crash: Callable[[BaseException], None],
        others: Sequence[RemoteEndpoint],
    ) -> None:
        """`config` and `pool` are rank 0's; `others` are the endpoints of ranks 1, 2, …"""
        self._config = config
        self._on_event = on_event
        self._on_crash = on_crash
        self._local = TransferEndpoint(
            config,
            pool=pool,
            clock=clock,
            on_event=partial(self._on_report, 0),
            on_crash=on_crash,
        )
        self._others = others
        self.source = LeaseGroups(range(1 + len(others)))
        self._pulls = PullGroups()
        self._counters: Counter[str] = Counter()
        self._todo: deque[Callable[[], list[GroupEffect]]] = deque()
        self._is_busy = False  # True while a thread handles the queue `_todo`
        self._lock = threading.Lock()  # guards `_todo` and `_is_busy` against concurrent threads

    def open(self) -> TransferAddress:
        """Opens the endpoints of all ranks; returns the address for sinks.

        Raises ConfigError if the configured transport is not available.
        """
        address = self._local.open()
        others = [
            other.open(partial(self._on_report, rank), partial(self._on_lost, rank))
            for rank, other in enumerate(self._others, start=1)
        ]
        shards = tuple(rank.shard for rank in (address, *others))
        assert shards == self._config.identity.ranks, "the ranks hold other shares"
        named = tuple(RankAddress(other.address, other.shard) for other in others)
        return msgspec.structs.replace(address, others=named)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports by which other workers can read this worker's KV, the same at all
        ranks.
        """
        return self._local.transports

    def perform(self, order: TransferOrder) -> None:
        """Queues an order for all ranks. Safe from any thread."""
        self._handle(partial(self._order, order))

    def counters(self) -> dict[str, float]:
        """Returns counters since the start, by `name` or `name:reason`. Safe from any thread."""
        own = self._local.counters()
        summed: Counter[str] = Counter()
        for counters in (own, *(other.counters() for other in self._others)):
            for name, amount in counters.items():
                if name.partition(":")[0] not in COUNTED_WHOLE:
                    summed[name] += amount  # type: ignore[assignment]
        if "pulled_blocks" in own:
            summed["pulled_blocks"] = own["pulled_blocks"]  # type: ignore[assignment]
        return {**summed, **self._counters}

    def close(self) -> None:
        """Closes the endpoints of all ranks."""
        for other in self._others:
            other.close()
        self._local.close()

    # ------------------------------------------------------------ the queue of orders and reports

    def _handle(self, what: Callable[[], list[GroupEffect]]) -> None:
        """Queues an order or report. Handles the queue, unless another thread does so already."""
        with self._lock:
            self._todo.append(what)
            if self._is_busy:
                return
            self._is_busy = True
        try:
            while (do := self._next()) is not None:
                self._perform(do())
        except BaseException as error:
            self._on_crash(error)
            raise

    def _next(self) -> Callable[[], list[GroupEffect]] | None:
        with self._lock:
            self._is_busy = bool(self._todo)
            return self._todo.popleft() if self._todo else None

    def _order(self, order: TransferOrder) -> list[GroupEffect]:
        match order:
            case OpenLease():
                return self.source.open(order)
            case GrowLease():
                return self.source.grow(order)
            case RevokeLease():
                return self.source.revoke(order)
            case HoldLease(seq_id, lease):
                ranks = range(1 + len(self._others))
                return self._pulls.hold(seq_id, dict.fromkeys(ranks, lease))
            case StartPull():
                return self._pulls.start(order)
            case AbortPull():
                return self._pulls.abort(order)

    def _on_report(self, rank: int, report: Event) -> None:
        assert isinstance(report, TransferReport)
        ended = self.source.ended if isinstance(report, LeaseEnded) else self._pulls.ended
        self._handle(partial(ended, rank, report))  # type: ignore[arg-type]

    def _on_lost(self, rank: int) -> None:
        log.warning("the transfer endpoint of rank %d is lost", rank)
        self._handle(partial(self._pulls.lose, rank, RANK_DIED))
        self._handle(partial(self.source.lose, rank, RANK_DIED))

    def _perform(self, effects: list[GroupEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ToMember):
                member = self._others[effect.member - 1] if effect.member else self._local
                member.perform(effect.order)
            else:
                self._counters.update(counts_of(effect))
                self._on_event(effect)
