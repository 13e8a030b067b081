"""A worker's transfer endpoint: one thread that runs both ends of the protocol on real sockets.

The worker's core gives it orders (`perform`) and gets events back through `on_event`, which is
called on the endpoint's thread. All bytes are moved on that thread too, so when it reports that a
pull is over nothing of that pull can write any more.

Source side: one ROUTER socket, to which sinks connect. Sink side: one DEALER socket per source.
"""

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from engine.blocks import BlockId
from engine.clock import Clock
from engine.errors import ProtocolError
from engine.events import (
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
)
from engine.messages import Incarnation, WorkerId
from engine.messages import TransferAddress as Address
from kvtransfer.memory import Blocks, SharedPool, ShmUnavailable, map_offer
from kvtransfer.messages import (
    MAX_BLOCKS_PER_READ,
    Data,
    Identity,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvtransfer.protocol import (
    CloseSource,
    Fetch,
    SendBlocks,
    SendToSink,
    SendToSource,
    SinkEffect,
    SinkMachine,
    SourceEffect,
    SourceMachine,
    Timing,
    UseSource,
)
from kvtransfer.readers import Reader, ShmReader, Transport, ZmqReader, checksum

log = logging.getLogger(__name__)

TransferOrder = OpenLease | GrowLease | RevokeLease | HoldLease | StartPull | AbortPull
MAX_POLL_S = 0.25
MAX_MESSAGE_BYTES = 2**20
MAX_MESSAGES_PER_TURN = 64  # of one socket, before the others and the deadlines have their turn
MAX_DATA_BYTES = 16 * 2**20  # of one Data: one that takes longer than a deadline never arrives


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """Who the worker is, what it may exchange with whom, and how."""

    worker_id: WorkerId
    incarnation: Incarnation
    identity: Identity
    token: str
    transport: Transport = Transport.AUTO
    host: str = "127.0.0.1"
    timing: Timing = field(default_factory=Timing)


class TransferEndpoint:
    """Leases out the blocks of one pool and pulls blocks into it."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        pool: SharedPool,
        clock: Clock,
        on_event: Callable[[Event], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._clock = clock
        self._on_event = on_event
        self._on_crash = on_crash
        self._orders: queue.SimpleQueue[TransferOrder] = queue.SimpleQueue()
        self._stopping = False
        self._counters: Counter[str] = Counter()
        self._copy_s = 0.0

    def open(self) -> Address:
        """Binds the socket and starts the thread; returns where sinks can connect."""
        self._blocks = self._pool.blocks
        shm = self._pool.offer() if self._config.transport is not Transport.ZMQ else None
        self.source = SourceMachine(
            incarnation=self._config.incarnation,
            identity=self._config.identity,
            num_blocks=self._pool.num_blocks,
            token=self._config.token,
            shm=shm,
            timing=self._config.timing,
        )
        self.sink = SinkMachine(
            incarnation=self._config.incarnation,
            identity=self._config.identity,
            token=self._config.token,
            timing=self._config.timing,
            window_blocks=_window_blocks(self._pool.block_bytes),
        )
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is an error, not silence
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # sinks send no payload
        port = self._router.bind_to_random_port(f"tcp://{self._config.host}")
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._readers: dict[str, Reader] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()
        return Address(
            self._config.worker_id, self._config.incarnation, f"tcp://{self._config.host}:{port}"
        )

    def perform(self, order: TransferOrder) -> None:
        """Queues an order. Safe from any thread."""
        self._orders.put(order)
        os.eventfd_write(self._wake_fd, 1)

    def counters(self) -> dict[str, float]:
        """Transfer counters since the start: blocks, bytes, seconds, failures by reason."""
        return {**self._counters, "copy_seconds": self._copy_s}

    def close(self) -> None:
        """Stops the thread and closes the sockets."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)
        assert not self._thread.is_alive(), "the transfer thread did not stop"
        os.close(self._wake_fd)  # not by the thread, which may end before it is woken

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                self._take_orders()
                self._receive_from_sinks()
                for address in list(self._dealers):
                    self._receive_from_source(address)
                now_s = self._clock.now_s()
                self._do_source(self.source.sweep(now_s))
                self._do_sink(self.sink.sweep(now_s))
        except BaseException as error:
            self._on_crash(error)
            raise
        finally:
            self._readers.clear()  # unmaps the sources' memory
            for socket in [self._router, *self._dealers.values()]:
                socket.close(linger=0)
            self._context.term()

    def _wait(self) -> None:
        wakes = [self.source.next_wake_s(), self.sink.next_wake_s()]
        due_s = min((w - self._clock.now_s() for w in wakes if w is not None), default=MAX_POLL_S)
        events = dict(self._poller.poll(int(1000 * min(max(due_s, 0.0), MAX_POLL_S))))
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)

    def _take_orders(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            self._order(order, self._clock.now_s())

    def _order(self, order: TransferOrder, now_s: float) -> None:
        match order:
            case OpenLease():
                self._do_source(self.source.open(order.lease_id, order.num_blocks, now_s))
            case GrowLease():
                self._do_source(self.source.grow(order.lease_id, order.block_ids, now_s))
            case RevokeLease():
                self._do_source(self.source.revoke(order.lease_id, now_s))
            case HoldLease():
                self._do_sink(self.sink.hold(order.seq_id, order.lease, now_s))
            case StartPull():
                self._do_sink(self.sink.start(order.seq_id, order.blocks, now_s))
            case AbortPull():
                self._do_sink(self.sink.abort(order.seq_id, now_s))

    # ------------------------------------------------------------ source side

    def _receive_from_sinks(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError("a sink's message has one frame")
                message = decode_to_source(frames[0])
            except ProtocolError as error:
                self._count("bad_messages")
                log.warning("ignored a sink's message: %s", error)
                continue
            self._take_orders()  # the order that opened the lease is older than this message
            self._do_source(self.source.receive(peer, message, self._clock.now_s()))

    def _do_source(self, effects: list[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToSink():
                    self._send_to_sink([effect.peer, encode(effect.message)])
                case SendBlocks():
                    blocks = [self._blocks[b] for b in effect.block_ids]
                    data = Data(
                        effect.lease_id, list(effect.indices), [checksum(b) for b in blocks]
                    )
                    self._send_to_sink([effect.peer, encode(data), *(b.data for b in blocks)])
                case LeaseEnded():
                    self._count(f"leases_{effect.reason.replace(' ', '_')}")
                    self._on_event(effect)

    def _send_to_sink(self, frames: list[Any]) -> None:
        try:
            # Copied by ZeroMQ before this returns: the blocks may change hands afterwards.
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            self._count("unsent_messages")  # the sink's deadline or the lease's deals with it
            log.warning("a message to a sink was not sent: %s", error)

    # ------------------------------------------------------------ sink side

    def _receive_from_source(self, address: str) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            dealer = self._dealers.get(address)
            if dealer is None:
                return
            try:
                header = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            now_s = self._clock.now_s()
            try:
                message = decode_to_sink(header)
                arrived = self._receive_blocks(dealer, address, message)
            except ProtocolError as error:
                self._count("bad_messages")
                log.warning("ignored a message of %s: %s", address, error)
                self._drain(dealer)
                continue
            self._do_sink(self.sink.receive(address, message, now_s))
            if isinstance(message, Data):
                self._do_sink(arrived)

    def _receive_blocks(
        self, dealer: "zmq.Socket[bytes]", address: str, message: object
    ) -> list[SinkEffect]:
        """Receives the payload of a Data into place, and checks it."""
        if not isinstance(message, Data):
            if dealer.get(zmq.RCVMORE):
                raise ProtocolError("unexpected payload")
            return []
        if len(message.checksums) != len(message.indices):
            raise ProtocolError("Data names a different number of blocks and checksums")
        places = self.sink.places(address, message)
        good: list[int] = []
        for index, expected, place in zip(message.indices, message.checksums, places, strict=True):
            if not dealer.get(zmq.RCVMORE):
                raise ProtocolError("Data has too few frames")
            if place is None:
                dealer.recv()
            elif not self._receive_block(dealer, place, expected):
                self._drain(dealer)
                reason = "a block arrived damaged"
                return self.sink.fetch_failed(message.lease_id, reason, self._clock.now_s())
            else:
                good.append(index)
        if dealer.get(zmq.RCVMORE):
            raise ProtocolError("Data has too many frames")
        return self._fetched(message.lease_id, tuple(good))

    def _receive_block(self, dealer: "zmq.Socket[bytes]", place: BlockId, expected: int) -> bool:
        block = self._blocks[place]
        num_bytes = dealer.recv_into(block)
        return num_bytes == block.nbytes and checksum(block) == expected

    @staticmethod
    def _drain(dealer: "zmq.Socket[bytes]") -> None:
        while dealer.get(zmq.RCVMORE):
            dealer.recv()

    def _fetched(self, lease_id: Any, indices: tuple[int, ...]) -> list[SinkEffect]:
        self._counters["pulled_blocks"] += len(indices)
        self._counters["pulled_bytes"] += len(indices) * self._pool.block_bytes
        return self.sink.fetched(lease_id, indices, self._clock.now_s())

    def _do_sink(self, effects: list[SinkEffect]) -> None:
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            match effect:
                case SendToSource():
                    self._send_to_source(effect)
                case UseSource():
                    todo += self._use_source(effect)
                case Fetch():
                    todo += self._fetch(effect)
                case CloseSource():
                    self._readers.pop(effect.address, None)
                    self._close_dealer(effect.address)
                case PullDone():
                    self._count("pulls_done")
                    self._on_event(effect)
                case PullFailed():
                    self._count(f"pulls_failed_{effect.reason.split(':')[0].replace(' ', '_')}")
                    self._on_event(effect)

    def _fetch(self, effect: Fetch) -> list[SinkEffect]:
        started_s = self._clock.now_s()
        done = self._readers[effect.address].fetch(effect.lease_id, effect.copies)
        if not done:
            return []
        self._copy_s += self._clock.now_s() - started_s
        return self._fetched(effect.lease_id, done)

    def _use_source(self, source: UseSource) -> list[SinkEffect]:
        try:
            reader = self._choose_reader(source)
        except ShmUnavailable as error:
            log.warning("not pulling from %s: %s", source.address, error)
            return self.sink.refuse_source(source.address, "shared memory unavailable")
        self._readers[source.address] = reader
        self.sink.use_transport(source.address, reader.name)
        log.info("pulling from %s over %s", source.address, reader.name)
        return []

    def _choose_reader(self, source: UseSource) -> Reader:
        """Raises ShmUnavailable where nothing else is allowed."""
        if self._config.transport is not Transport.ZMQ:
            try:
                return ShmReader(self._map(source), self._blocks)
            except ShmUnavailable as error:
                if self._config.transport is Transport.SHM:
                    raise
                self._count("fallbacks_shm_unavailable")
                log.warning("pulling from %s over zmq: %s", source.address, error)
        return ZmqReader(lambda read: self._send_to_source(SendToSource(source.address, read)))

    def _map(self, source: UseSource) -> Blocks:
        if source.shm is None:
            raise ShmUnavailable("source offers no shared memory")
        return map_offer(source.shm, source.num_blocks, self._pool.block_bytes)

    def _send_to_source(self, effect: SendToSource) -> None:
        try:
            dealer = self._dealers.get(effect.address) or self._open_dealer(effect.address)
            dealer.send(encode(effect.message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._count("unsent_messages")  # the source counts as silent soon
            log.warning("a message to %s was not sent: %s", effect.address, error)

    def _open_dealer(self, address: str) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.IMMEDIATE, 0)
        dealer.set(zmq.MAXMSGSIZE, max(self._pool.block_bytes, MAX_MESSAGE_BYTES))
        try:
            dealer.connect(address)
        except zmq.ZMQError:
            dealer.close()
            raise
        self._dealers[address] = dealer
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _close_dealer(self, address: str) -> None:
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=0)

    def _count(self, name: str) -> None:
        self._counters[name] += 1


def _window_blocks(block_bytes: int) -> int:
    """Blocks of a pull that may be on their way at once, in one Data at most."""
    return min(MAX_BLOCKS_PER_READ, max(1, MAX_DATA_BYTES // block_bytes))
