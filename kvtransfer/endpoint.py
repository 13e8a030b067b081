"""The transfer endpoint of a worker's rank: one thread that runs both ends of the protocol on real
sockets.

The worker's core gives orders to the endpoint (`perform`) and gets events back through `on_event`,
which is called on the endpoint's thread or within `perform`. Only these threads, and reads that the
endpoint's thread watches, write to the pool. So once the endpoint reports the end of a pull,
nothing writes to the pull's blocks any more.

The thread sleeps until a socket, an order or a deadline wakes it. While blocks wait for a staging
buffer, or a one-sided read is in flight, the thread polls, because no descriptor would wake it.

Waking another thread takes as long as copying hundreds of KiB. So the thread that orders a short
pull carries the pull out itself, if the endpoint's thread sleeps. A lock ensures that only one of
the two threads works. The sleeping thread watches the descriptors of the sockets, because it may
not touch the sockets themselves.

While a pull waits for its source, the thread makes the system allocate pages for the pull's blocks.
Pulls are the first to touch a pool's memory, and a page fault takes longer than the copy.
"""

import logging
import math
import os
import queue
import secrets
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from engine.clock import Clock
from engine.config import Transport
from engine.errors import ConfigError
from engine.layout import WHOLE
from engine.messages import Incarnation, WorkerId
from engine.messages import TransferAddress as Address
from engine.net.curve import Channel, Doorkeeper
from engine.net.trust import Secret
from engine.worker.blocks import BlockId
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
    TransferReport,
)
from kvtransfer.connections import SourceConnections
from kvtransfer.device.blocks import DevicePool, reach
from kvtransfer.device.cuda_driver import DriverError
from kvtransfer.lease.effects import Timing
from kvtransfer.lease.group import RankedPulls
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease.source import SourceMachine
from kvtransfer.lease_words import LeaseWords, NoWords
from kvtransfer.memory import Pool, keep_freed_memory, touch
from kvtransfer.messages import Identity, Offers
from kvtransfer.native.stream import can_seal
from kvtransfer.source_end import SourceEnd
from kvtransfer.transports.ipc import DeviceTransport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.nixl_agent import has_rdma
from kvtransfer.transports.seam import BlockTransport, TransferContext, TransportUnavailable
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.zmq import ZmqTransport

log = logging.getLogger(__name__)

MAX_POLL_S = 0.25
# longest wait for a staging buffer before sockets and orders are served, seconds
BUFFER_WAIT_S = 0.001
SHORT_PULL_BYTES = 2**20  # up to this size of a pull, the ordering thread copies the blocks itself


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """The settings of an endpoint: the worker's identity, secret, transport and deadlines."""

    worker_id: WorkerId
    incarnation: Incarnation  # all ranks of the worker have the same one
    identity: Identity
    secret: Secret
    transport: Transport = Transport.AUTO
    host: str = "127.0.0.1"
    timing: Timing = field(default_factory=Timing)


class TransferEndpoint:
    """Leases out the blocks of one pool, and pulls blocks into the pool."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        pool: Pool,
        clock: Clock,
        on_event: Callable[[Event], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._needs_nixl = config.transport is Transport.NIXL or reach(pool) is None
        self._clock = clock
        self._on_event = on_event
        self._on_crash = on_crash
        self._orders: queue.SimpleQueue[TransferOrder] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all fields below but the queue of orders
        # time at which the machines' deadlines must be checked next, computed in the last iteration
        self._due_s = 0.0
        self._stopping = False
        # blocks of pulls whose memory pages may not be allocated yet
        self._untouched: deque[BlockId] = deque()
        self._touched: set[BlockId] = set()
        # ends of the parts of pulls from several source ranks
        self._part_ends: deque[PullDone | PullFailed] = deque()
        self._counters: Counter[str] = Counter()
        self._doorkeeper = Doorkeeper(config.secret, Channel.KV, clock)

    def open(self) -> Address:
        """Binds the socket and starts the thread; returns the address of this rank for sinks.

        Raises ConfigError if the configured transport is not available.
        """
        config = self._config
        keep_freed_memory()
        self._blocks = self._pool.blocks
        by_memory = self._transports_by_memory()
        offers = self._offer_memory(by_memory)
        words = _open_words(config.transport, self._count)
        self._context = zmq.Context()
        self._doorkeeper.open(self._context)
        self._poller = select.epoll()
        shared = TransferContext(
            self._context, self._poller, config.secret, config.timing, self._clock, self._count
        )
        self._open_sink(shared, by_memory)
        if reach(self._pool) is not None and can_seal():
            self._by_message.sealed_source.listen(config.host)
        offers = self._by_message.offer(offers)
        if words is not None:
            offers = msgspec.structs.replace(offers, words=words.offer())
        self.transports = tuple(_ways(offers))
        self.source = SourceMachine(
            incarnation=config.incarnation,
            identity=config.identity,
            num_blocks=self._pool.num_blocks,
            timing=config.timing,
            offers=offers,
        )
        self._source_end = SourceEnd(
            *(shared, self.source, self._by_message),
            words=words,
            before=self._perform_orders,
            on_ended=self._report,
        )
        address = self._source_end.open(config.host)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._source_end.socket, select.EPOLLIN)
        self._poller.register(self._wake_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()
        shard = config.identity.shard
        return Address(config.worker_id, config.incarnation, address, shard)

    def perform(self, order: TransferOrder) -> None:
        """Queues an order, or carries out a short order at once. Safe from any thread."""
        is_short = (
            isinstance(order, StartPull)
            and len(order.blocks) * self._pool.block_bytes <= SHORT_PULL_BYTES
            # Copies to or from a device need the device's context, which this thread may lack.
            and not isinstance(self._pool, DevicePool)
        )
        if is_short and self._orders.empty() and self._lock.acquire(blocking=False):
            must_wake = self._perform_now(order)
        else:
            self._orders.put(order)
            must_wake = True
        if must_wake:
            os.eventfd_write(self._wake_fd, 1)

    def counters(self) -> dict[str, float]:
        """Returns counters since the start, by `name` or `name:reason`. Safe from any thread."""
        own = {**self._counters, **self._doorkeeper.counters}
        return {**own, "reread_blocks": self.sink.num_rereads}

    def close(self) -> None:
        """Stops the thread and closes the sockets."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)
        assert not self._thread.is_alive(), "the transfer thread did not stop"
        self._poller.close()
        os.close(self._wake_fd)  # closed here, since the thread may end without being woken
        # These objects refer to this endpoint and to the pool. Dropping them frees the pool at
        # once.
        del self._source_end, self._connections, self._by_message, self._nixl, self._blocks

    def _open_sink(self, shared: TransferContext, by_memory: Sequence[BlockTransport]) -> None:
        config = self._config
        self.sink = SinkMachine(
            incarnation=config.incarnation, identity=config.identity, timing=config.timing
        )
        self._ranked = RankedPulls(config.identity, self.sink)
        self._connections = SourceConnections(
            shared, self.sink, block_bytes=self._pool.block_bytes, on_end=self._on_end
        )
        self._by_message = ZmqTransport(
            shared, reach(self._pool), places=self.sink.places, post=self._connections.post
        )
        transports = [*by_memory, self._by_message]
        if config.transport is not Transport.AUTO:
            transports = [one for one in transports if one.name is config.transport]
        self._connections.open(transports, self._by_message)

    def _transports_by_memory(self) -> list[BlockTransport]:
        """Returns the transports that read sources' memory themselves, in order of preference."""
        pool, config = self._pool, self._config
        transports: list[BlockTransport] = [ShmTransport(pool)]
        if isinstance(pool, DevicePool):
            transports = [DeviceTransport(way, pool) for way in (Transport.SHM, Transport.IPC)]
        elif config.transport is Transport.IPC:
            raise ConfigError("kv_transport = ipc is for workers that compute on GPUs")
        self._nixl: NixlTransport | None = None
        if self._needs_nixl or (config.transport is Transport.AUTO and has_rdma()):
            # a unique name of this rank's endpoint
            name = f"{config.worker_id}.{config.incarnation}.{secrets.token_hex(4)}"
            self._nixl = NixlTransport(
                *(name, pool.region()), record_bytes=pool.block_bytes, count=self._count
            )
            transports.append(self._nixl)
        return transports

    def _offer_memory(self, transports: Sequence[BlockTransport]) -> Offers:
        """Offers the pool through all allowed transports. Raises ConfigError if none can be
        used.
        """
        if isinstance(self._pool, DevicePool):
            try:
                self._pool.device.driver.enter()
            except DriverError as error:
                raise ConfigError(f"KV cannot be moved from a GPU: {error}") from error
        offers = Offers()
        for transport in transports:
            is_nixl = transport is self._nixl
            if not is_nixl and self._config.transport not in (Transport.AUTO, transport.name):
                continue
            try:
                offers = transport.offer(offers)
            except TransportUnavailable as error:
                if is_nixl and self._needs_nixl:
                    raise ConfigError(f"KV cannot be moved over NIXL: {error}") from error
                self._count(f"fallbacks:{transport.name}_{error.fallback}")
                log.warning("KV is not offered over %s: %s", transport.name, error)
        return offers

    # ------------------------------------------------------------ on the ordering thread

    def _perform_now(self, order: TransferOrder) -> bool:
        """Carries out an order on the calling thread, which has acquired the lock, and releases the
        lock.

        Returns True if the endpoint's thread must continue the work.
        """
        try:
            if self._stopping:
                return False
            self._order(order)
            if self._connections.must_poll:
                self._connections.poll()
            self._end_parts()
            self._connections.send()
            return self._must_go_on
        except BaseException as error:
            self._on_crash(error)
            raise
        finally:
            self._lock.release()

    # ------------------------------------------------------------ on the endpoint's thread

    def _run(self) -> None:
        try:
            if isinstance(self._pool, DevicePool):
                self._pool.device.driver.enter()
            timeout_s = 0.0
            while not self._stopping:
                ready = self._wait(timeout_s)
                with self._lock:
                    self._serve(ready)
                    timeout_s = self._timeout_s()
        except BaseException as error:
            self._on_crash(error)
            raise
        finally:
            with self._lock:
                self._stopping = True
                self._connections.close()  # unmaps the memory of all sources
                self._source_end.close()
                if self._nixl is not None:
                    self._nixl.stop()
                self._context.term()
                if isinstance(self._pool, DevicePool):
                    self._pool.device.driver.close()

    def _serve(self, ready: Collection[int]) -> None:
        self._by_message.wait_for_buffer(BUFFER_WAIT_S)
        self._perform_orders()
        self._source_end.receive(ready)
        self._source_end.send_blocks(may_wait=not self._connections.must_poll)
        self._connections.receive(ready, may_wait=not self._by_message.has_work)
        if (now_s := self._clock.now_s()) >= self._due_s:
            self._source_end.perform(self.source.sweep(now_s))
            self._connections.perform(self.sink.sweep(now_s))
        self._end_parts()
        self._connections.send()
        if not ready:
            self._touch_next()

    def _touch_soon(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            if block not in self._touched:
                self._untouched.append(block)

    def _touch_next(self) -> None:
        """Touches a single block, so that sockets and orders are served between two blocks."""
        if not self.sink.num_pulls:
            self._untouched.clear()
        if not self._untouched:
            return
        block = self._untouched.popleft()
        self._touched.add(block)
        if self._blocks is None or not touch(self._blocks, block):
            self._untouched.clear()

    def _wait(self, timeout_s: float) -> Collection[int]:
        """Waits for a socket or an order. Returns the ready descriptors."""
        ready = {fd for fd, _ in self._poller.poll(timeout_s)}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return ready

    @property
    def _must_go_on(self) -> bool:
        """True if there is work to do that no descriptor will report."""
        source, sink = self._source_end, self._connections
        has_work = source.has_mail or sink.has_mail or self._by_message.has_work
        return has_work or sink.must_poll or bool(self._untouched)

    def _timeout_s(self) -> float:
        wakes = [self.source.next_wake_s(), self.sink.next_wake_s()]
        self._due_s = min((wake_s for wake_s in wakes if wake_s is not None), default=math.inf)
        if self._must_go_on:
            return 0.0
        return min(max(self._due_s - self._clock.now_s(), 0.0), MAX_POLL_S)

    def _perform_orders(self) -> None:
        while not self._orders.empty():
            self._order(self._orders.get())

    def _order(self, order: TransferOrder) -> None:
        now_s = self._clock.now_s()
        sink = self._connections
        match order:
            case OpenLease():
                effects = self.source.open(order.lease_id, order.num_blocks, now_s)
                self._source_end.perform(effects)
            case GrowLease():
                self._source_end.perform(self.source.grow(order.lease_id, order.block_ids, now_s))
            case RevokeLease():
                self._source_end.perform(self.source.revoke(order.lease_id, now_s))
            case HoldLease(seq_id, lease) if (
                lease.source.shard == WHOLE and not lease.source.others
            ):
                sink.perform(self.sink.hold(seq_id, lease, now_s))
            case StartPull(seq_id, blocks) if seq_id not in self._ranked.parts:
                sink.perform(self.sink.start(seq_id, blocks, now_s))
                self._touch_soon(self.sink.awaited(seq_id))
            case AbortPull(seq_id) if seq_id not in self._ranked.parts:
                sink.perform(self.sink.abort(seq_id, now_s))
            case HoldLease() | StartPull() | AbortPull():
                sink.perform(self._ranked.order(order, now_s))
                self._touch_soon(self._ranked.awaited(order.seq_id))
                self._end_parts()

    def _on_end(self, end: PullDone | PullFailed) -> None:
        if end.seq_id in self._ranked.wholes:
            self._part_ends.append(end)
        else:
            self._report(end)

    def _end_parts(self) -> None:
        while self._part_ends:
            end = self._part_ends.popleft()
            self._connections.perform(self._ranked.ended(end, self._clock.now_s()))

    def _report(self, report: TransferReport) -> None:
        self._counters.update(counts_of(report))
        self._on_event(report)

    def _count(self, name: str, amount: float = 1) -> None:
        self._counters[name] += amount  # type: ignore[assignment]


def _open_words(transport: Transport, count: Callable[[str], None]) -> LeaseWords | None:
    """Creates the lease words, if sinks may read the pool's memory directly."""
    if transport is Transport.ZMQ:
        return None
    words = LeaseWords()
    try:
        words.open()
    except NoWords as error:
        count("fallbacks:lease_words_unavailable")
        log.warning("leases have no words, so each pull waits for an answer: %s", error)
        return None
    return words


def _ways(offers: Offers) -> Iterator[str]:
    """Yields the transports that can read from a source, in order of preference."""
    has = {
        Transport.SHM: offers.shm is not None,
        Transport.IPC: offers.ipc is not None,
        Transport.NIXL: offers.nixl is not None,
        Transport.ZMQ: offers.sends,
    }
    yield from (str(way) for way, is_there in has.items() if is_there)


def counts_of(report: TransferReport) -> dict[str, float]:
    """Returns the amounts that the end of a pull or lease adds to its endpoint's counters."""
    if isinstance(report, PullDone):
        transfer_s, exposed_s = report.transfer_s, report.exposed_s
        return {"pulls_done": 1, "transfer_seconds": transfer_s, "exposed_seconds": exposed_s}
    what = "leases_ended" if isinstance(report, LeaseEnded) else "pulls_failed"
    return {f"{what}:{report.reason.partition(':')[0].replace(' ', '_')}": 1}
