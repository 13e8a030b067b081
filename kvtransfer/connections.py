"""The connections of a sink to its sources: a DEALER socket and a transport for each source.

A connection keeps its routing id when it breaks and is made again. So the source still recognises
the sink and its leases, and the pull continues without fetching blocks a second time.
"""

import logging
import secrets
import select
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import zmq

from engine.config import Transport
from engine.errors import ProtocolError
from engine.net.curve import Channel, keep_alive, secure_client
from engine.worker.events import PullDone, PullFailed
from kvtransfer.lease.effects import CloseSource, Fetch, SendToSource, SinkEffect, UseSource
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease_words import NoWords, SourcesWords
from kvtransfer.memory import boot_id
from kvtransfer.messages import Data, MaySeal, ToSource, decode_to_sink, encode
from kvtransfer.source_end import has_mail
from kvtransfer.transports.seam import (
    FRAME_BYTES,
    BlocksArrived,
    BlocksFailed,
    BlockTransport,
    FetchEnd,
    TransferContext,
    TransportUnavailable,
)
from kvtransfer.transports.zmq import ZmqTransport

log = logging.getLogger(__name__)

# messages handled for one source before other sources and deadlines are served
MAX_MESSAGES_PER_TURN = 64


@dataclass(slots=True)
class _Connection:
    """A connection to a source. `transport` is set once the source has accepted this sink."""

    socket: "zmq.Socket[bytes]"
    transport: BlockTransport | None = None
    words: SourcesWords | None = None  # lease words of a source on this host
    share_bytes: int = 0  # bytes of each local block that this source sends


class SourceConnections:
    """Performs the effects of the sink machine. Owned by the transfer thread."""

    def __init__(
        self,
        context: TransferContext,
        machine: SinkMachine,
        *,
        block_bytes: int,
        on_end: Callable[[PullDone | PullFailed], None],
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._count = context.count
        self._machine = machine
        self._block_bytes = block_bytes
        self._on_end = on_end
        self._links: dict[str, _Connection] = {}  # connections by the source's address
        # ended pulls that are not reported yet, since their blocks may still be written
        self._ending: list[PullDone | PullFailed] = []
        self._outbox: list[SendToSource] = []
        self._has_mail = False  # True if messages may be waiting that no descriptor reports

    def open(self, transports: Sequence[BlockTransport], by_message: ZmqTransport) -> None:
        """Sets the transports, in order of preference. Each source uses the first that it
        supports.
        """
        self._transports = transports
        self._by_message = by_message
        self._sealed = by_message.sealed_sink

    def close(self) -> None:
        """Closes every connection and unmaps the sources' memory."""
        for address in list(self._links):
            self._close_link(address)

    @property
    def must_poll(self) -> bool:
        """True if a read is in flight whose end no descriptor reports."""
        return any(transport.num_reads for transport in self._transports)

    @property
    def has_mail(self) -> bool:
        """True if messages or blocks may be waiting that no descriptor reports."""
        return self._has_mail or self._sealed.has_more

    # ------------------------------------------------------------ receiving

    def receive(self, ready: Collection[int], *, may_wait: bool) -> None:
        """Handles messages of sources, and fetches that have ended.

        `ready` are the descriptors that can be read or written. With `may_wait`, this waits briefly
        for the rest of a partly received message or frame.
        """
        self._has_mail = False
        for address in list(self._links):
            for _ in range(MAX_MESSAGES_PER_TURN):
                if not self._receive_one(address):
                    break
            else:
                self._has_mail = True  # more messages may be waiting
        self.poll(ready, may_wait=may_wait and not self.must_poll)

    def poll(self, ready: Collection[int] = (), *, may_wait: bool = False) -> None:
        """Handles fetches that have ended."""
        for transport in self._transports:
            for fetched in transport.poll(ready, may_wait=may_wait):
                self.perform(self._on_fetched(fetched))
        ending, self._ending = self._ending, []
        for end in ending:
            self._end(end)

    def _receive_one(self, address: str) -> bool:
        """Handles one message of a source, if one is waiting."""
        link = self._links.get(address)
        if link is None or not has_mail(link.socket):
            return False
        header = link.socket.recv(zmq.NOBLOCK)
        fetched: FetchEnd | None = None
        try:
            message = decode_to_sink(header)
            if isinstance(message, Data):
                payload, places = self._payload(link), self._machine.places(address, message)
                fetched = self._by_message.place(address, message, payload, places)
            elif link.socket.get(zmq.RCVMORE):
                raise ProtocolError("unexpected payload")
        except ProtocolError as error:
            self.perform(self._cut_off(address, error))
            return False
        if isinstance(message, MaySeal):
            self._sealed.connect(address, message.lanes)
        self.perform(self._machine.receive(address, message, self._clock.now_s()))
        if fetched is not None:
            self.perform(self._on_fetched(fetched))
        return True

    def _payload(self, link: _Connection) -> memoryview:
        """Receives the second frame of a Data. Raises ProtocolError."""
        if not link.socket.get(zmq.RCVMORE):
            raise ProtocolError("Data without its payload")
        frame = link.socket.recv(copy=False)
        if link.socket.get(zmq.RCVMORE):
            raise ProtocolError("Data has too many frames")
        return frame.buffer

    def _cut_off(self, address: str, error: ProtocolError) -> list[SinkEffect]:
        self._count("bad_messages", 1)
        log.warning("cut off source %s: %s", address, error)
        return self._machine.refuse_source(address, "source sends nonsense")

    def _on_fetched(self, end: FetchEnd) -> list[SinkEffect]:
        now_s, link = self._clock.now_s(), self._links.get(end.address)
        if link is None:
            return []  # the source's connection was closed before its blocks were in place
        if isinstance(end, BlocksArrived):
            are_good = end.data is not None
            if end.data is not None:
                self._machine.receive(end.address, end.data, now_s)
            if not end.indices:
                return []
            num_bytes = len(end.indices) * link.share_bytes
            self._count("pulled_blocks", num_bytes / self._block_bytes)
            self._count("pulled_bytes", num_bytes)
            if not are_good and link.words is not None:
                # An unchanged word proves that the lease was open until after its blocks were
                # copied.
                if end.word is None:
                    self._count("fallbacks:lease_without_word", 1)
                else:
                    are_good = link.words.prove(end.word)
            what = end.address, end.lease_id, end.indices, now_s
            return self._machine.fetched(*what, are_good=are_good)
        if not isinstance(end, BlocksFailed):
            return self._cut_off(end.address, end.error)
        log.warning("could not fetch blocks of lease %s: %s", end.lease_id, end.reason)
        self._count(f"failed_fetches:{end.reason.split(':')[0].replace(' ', '_')}", 1)
        if end.damaged:
            return self._machine.damaged(end.address, end.lease_id, end.indices, now_s)
        return self._machine.fetch_failed(end.address, end.lease_id, end.reason, now_s)

    # ------------------------------------------------------------ effects

    def perform(self, effects: list[SinkEffect]) -> None:
        """Performs effects, and all further effects that result from performing them."""
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            match effect:
                case SendToSource():
                    self._outbox.append(effect)
                case UseSource():
                    todo += self._use_source(effect)
                case Fetch():
                    transport = self._links[effect.address].transport
                    assert transport is not None, "the source has not accepted us"
                    for fetched in transport.fetch(effect):
                        todo += self._on_fetched(fetched)
                case CloseSource():
                    self._close_link(effect.address)
                case PullDone() | PullFailed():
                    self._end(effect)

    def _end(self, end: PullDone | PullFailed) -> None:
        """Reports the end of a pull once no transport can write to its blocks any more."""
        self._sealed.num_ended += 1
        for transport in self._transports:
            if transport.num_reads and transport.cancel(end.seq_id):
                self._ending.append(end)
                return
        self._on_end(end)

    # ------------------------------------------------------------ sources

    def _use_source(self, use: UseSource) -> list[SinkEffect]:
        link = self._links[use.address]
        if link.transport is not None or not use.wire.record_bytes:
            return []  # the source has repeated its answer, or gives this rank no bytes
        refused: list[str] = []
        for transport in self._transports:
            try:
                means = transport.open(use)
            except TransportUnavailable as error:
                refused.append(f"{transport.name}: {error}")
                if error.fallback is not None:
                    self._count(f"fallbacks:{transport.name}_{error.fallback}", 1)
                continue
            link.transport, link.share_bytes = transport, use.wire.wanted.block_bytes
            link.words = self._open_words(transport.name, use)
            self._machine.use_transport(use.address, means)
            why = "; ".join(refused) or "the first choice"
            log.info("pulling from %s over %s (%s)", use.address, transport.name, why)
            return []
        log.warning("not pulling from %s: %s", use.address, "; ".join(refused))
        return self._machine.refuse_source(use.address, f"no transport: {refused[-1]}")

    def _open_words(self, way: Transport, use: UseSource) -> SourcesWords | None:
        """Maps the lease words of a source on this host, unless the source sends its blocks."""
        offer = use.source.offers.words
        if way is Transport.ZMQ or (offer is not None and offer.boot_id != boot_id()):
            return None
        words = SourcesWords()
        try:
            if offer is None:
                raise NoWords("source offers none")
            words.open(offer)
        except NoWords as error:
            self._count(f"fallbacks:{way}_without_words", 1)
            log.warning("each pull from %s needs an answer to be done: %s", use.address, error)
            return None
        return words

    # ------------------------------------------------------------ sockets

    def post(self, address: str, message: ToSource) -> None:
        """Queues a message for `send`."""
        self._outbox.append(SendToSource(address, message))

    def send(self) -> None:
        """Sends the queued messages. Called last, because sending may wake another thread."""
        outbox, self._outbox = self._outbox, []
        for letter in outbox:
            try:
                link = self._links.get(letter.address) or self._open_link(letter.address)
                link.socket.send(encode(letter.message), zmq.NOBLOCK)
                self._has_mail = self._has_mail or has_mail(link.socket)
            except zmq.ZMQError as error:
                # the source does not read, and soon counts as silent
                self._count("unsent_messages", 1)
                log.warning("could not send a message to %s: %s", letter.address, error)

    def _open_link(self, address: str) -> _Connection:
        context = self._context
        socket = context.sockets.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, b"sink" + secrets.token_bytes(12))
        socket.set(zmq.LINGER, 0)
        longest_bytes = max(self._block_bytes, FRAME_BYTES)
        secure_client(socket, context.secret, Channel.KV, max_message_bytes=longest_bytes)
        keep_alive(socket, context.timing.silence_s)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        link = self._links[address] = _Connection(socket)
        self._context.poller.register(socket, select.EPOLLIN)
        self._has_mail = True  # messages may have arrived before the descriptor was watched
        return link

    def _close_link(self, address: str) -> None:
        self._outbox = [letter for letter in self._outbox if letter.address != address]
        link = self._links.pop(address, None)
        if link is None:
            return
        self._context.poller.unregister(link.socket)
        link.socket.close(linger=0)
        if link.words is not None:
            link.words.close()
        if link.transport is not None:
            link.transport.close(address)
