"""The sink's side of an endpoint: a DEALER socket and a reader for each source.

A connection keeps its routing id when it breaks and is made again. So the source still knows the
sink and its leases, and a pull continues from the blocks that it has.
"""

import logging
import math
import secrets
import select
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from engine.clock import Clock
from engine.config import Transport
from engine.errors import ProtocolError
from engine.messages import SeqId
from engine.net.curve import Channel, secure_client
from engine.net.trust import Secret
from engine.worker.events import PullDone, PullFailed
from kvtransfer.device.blocks import DeviceBlocks, Rows, rows_of
from kvtransfer.device.driver import DriverError, SharedAddress
from kvtransfer.device.reader import CopyReader
from kvtransfer.lease.effects import CloseSource, Fetch, SendToSource, SinkEffect, UseSource
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease.terms import Timing
from kvtransfer.lease_words import NoWords, SourcesWords
from kvtransfer.memory import Blocks, ShmUnavailable, boot_id, map_offer
from kvtransfer.messages import Data, MaySeal, Read, ToSink, decode_to_sink, encode
from kvtransfer.native.stream import can_seal
from kvtransfer.nixl_backend import NixlAgent, NixlUnavailable
from kvtransfer.readers import (
    FRAME_BYTES,
    BlocksArrived,
    BlocksFailed,
    FetchNews,
    OneSidedReader,
    Reader,
    ShmReader,
    ZmqReader,
)
from kvtransfer.source_end import has_mail, set_heartbeat
from kvtransfer.stream.sink import SealedLink, StreamLost, Target

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN = 64  # of one source; then other sources and deadlines have their turn
WAYS = {  # in order of preference
    Transport.AUTO: (Transport.SHM, Transport.IPC, Transport.NIXL, Transport.ZMQ),
    Transport.SHM: (Transport.SHM,),
    Transport.IPC: (Transport.IPC,),
    Transport.NIXL: (Transport.NIXL,),
    Transport.ZMQ: (Transport.ZMQ,),
}


PolledReader = OneSidedReader | CopyReader  # those whose fetches end later, unseen by a socket


class _Unfit(Exception):
    """A source cannot be read that way; the message says why."""


@dataclass(slots=True)
class _Link:
    """A connection to a source. `reader` is set once the source has accepted us."""

    socket: "zmq.Socket[bytes]"
    reader: Reader | None = None
    words: SourcesWords | None = None  # of its leases, if it is on this host
    target: Target | None = None  # of its sealed streams, if it sends its blocks
    sealed: SealedLink | None = None
    sealed_port: int | None = None
    seal_again_s: float = math.inf  # when to ask for another stream
    share_bytes: int = 0  # of a block here that come from this source


class SinkEnd:
    """Performs the effects of the sink's machine. Owned by the transfer thread."""

    def __init__(  # noqa: PLR0913 - wiring
        self,
        machine: SinkMachine,
        pool: Blocks | DeviceBlocks | None,
        block_bytes: int,
        *,
        transport: Transport,
        timing: Timing,
        clock: Clock,
        nixl: NixlAgent | None,
        on_end: Callable[[PullDone | PullFailed], None],
        count: Callable[[str, float], None],
    ) -> None:
        self._machine = machine
        self._pool = pool
        self._block_bytes = block_bytes
        self._transport = transport
        self._timing = timing
        self._clock = clock
        self._nixl = nixl
        self._on_end = on_end
        self._count = count
        self._links: dict[str, _Link] = {}
        self._ending: dict[SeqId, tuple[Reader, PullFailed]] = {}  # blocks are still being written
        self._closing: list[PolledReader] = []
        self._outbox: list[SendToSource] = []
        self.has_mail = False  # messages may wait that no descriptor reports

    def open(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        secret: Secret,
        poller: select.epoll,
    ) -> None:
        """Sets the context that makes connections, and the poller of their descriptors."""
        self._context = context
        self._secret = secret
        self._poller = poller

    def close(self) -> None:
        """Closes every connection, and lets go of the pool and of the sources' memory."""
        for address in list(self._links):
            self._close_link(address)
        del self._pool

    @property
    def must_poll(self) -> bool:
        """True if a read is under way whose end no socket reports."""
        return any(reader.num_reads for reader in [*self._polled(), *self._closing])

    # ------------------------------------------------------------ what comes

    def receive(self, ready: Collection[int], *, may_wait: bool) -> None:
        """Takes messages of sources, and reads that ended.

        `ready` are the descriptors that can be read or written. `may_wait`, for a moment, for
        more of what has begun to come.
        """
        self.has_mail = False
        for address, link in list(self._links.items()):
            for _ in range(MAX_MESSAGES_PER_TURN):
                if not self._receive_one(address):
                    break
            else:
                self.has_mail = True  # perhaps
            sealed = link.sealed
            if sealed is not None and (sealed.fileno() in ready or sealed.has_more):
                self._receive_sealed(address, sealed, may_wait=may_wait and not self.must_poll)
        self.poll()

    def poll(self) -> None:
        """Takes reads that ended."""
        for address, link in list(self._links.items()):
            for news in link.reader.poll() if link.reader is not None else ():
                if self._links.get(address) is link:
                    self.perform(self._take_news(address, news))
        for reader in self._closing:
            reader.poll()  # its pulls have failed
        self._end_pulls()

    def _receive_one(self, address: str) -> bool:
        """Takes one message, if there is one."""
        link = self._links.get(address)
        if link is None or not has_mail(link.socket):
            return False
        header = link.socket.recv(zmq.NOBLOCK)
        now_s = self._clock.now_s()
        try:
            message = decode_to_sink(header)
            news = self._receive_payload(link, address, message)
        except ProtocolError as error:
            self._cut_off(address, error)
            return False
        if isinstance(message, MaySeal):
            self._connect_sealed(address, link, message.lanes)
        self.perform(self._machine.receive(address, message, now_s))
        if news is not None:
            self.perform(self._take_news(address, news))
        return True

    def _receive_sealed(self, address: str, sealed: SealedLink, *, may_wait: bool) -> None:
        """Takes what has come over a sealed stream: one step, which may bring blocks."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            link = self._links.get(address)
            if link is None or link.sealed is not sealed:
                return
            assert link.target is not None
            try:
                arrived = sealed.receive(link.target, may_wait=may_wait)
            except ProtocolError as error:
                self._cut_off(address, error)
                return
            except StreamLost as error:
                self._lose_sealed(address, link, str(error))
                return
            if arrived is not None:
                now_s = self._clock.now_s()
                self.perform(self._machine.receive(address, arrived.data, now_s))
                if arrived.indices:
                    lease_id = arrived.data.lease_id
                    news = BlocksArrived(lease_id, arrived.indices, sent_by_source=True)
                    self.perform(self._take_news(address, news))
                    break  # what follows from them is done before more is awaited
            if not sealed.has_more:
                return
        self.has_mail = self.has_mail or sealed.has_more

    def _lose_sealed(self, address: str, link: _Link, reason: str) -> None:
        """Blocks come over CURVE again, until another stream is there."""
        assert link.sealed is not None
        landing = link.sealed.landing
        link.sealed.close()
        link.sealed = None
        link.seal_again_s = self._clock.now_s() + self._timing.silence_s
        self._fall_back(Transport.ZMQ, "unsealed")
        log.warning("the sealed stream of %s has ended: %s", address, reason)
        if landing is not None and landing.awaited:
            lost = BlocksFailed(landing.data.lease_id, landing.awaited, reason, damaged=True)
            self.perform(self._take_news(address, lost))

    def _cut_off(self, address: str, error: ProtocolError) -> None:
        self._count("bad_messages", 1)
        log.warning("cut off source %s: %s", address, error)
        self.perform(self._machine.refuse_source(address, "source sends nonsense"))

    def _connect_sealed(self, address: str, link: _Link, lanes: int) -> None:
        if link.sealed is None or link.sealed.is_connecting:
            return  # a source that answers twice
        assert link.sealed_port is not None
        try:
            link.sealed.connect(address, link.sealed_port, self._poller, self._timing, lanes=lanes)
        except OSError as error:
            self._lose_sealed(address, link, str(error))

    def _receive_payload(self, link: _Link, address: str, message: ToSink) -> FetchNews | None:
        """Receives the records of a Data, checks them and puts them in their places."""
        if not isinstance(message, Data):
            if link.socket.get(zmq.RCVMORE):
                raise ProtocolError("unexpected payload")
            return None
        if not link.socket.get(zmq.RCVMORE):
            raise ProtocolError("Data without its payload")
        frame = link.socket.recv(copy=False)
        if link.socket.get(zmq.RCVMORE):
            raise ProtocolError("Data has too many frames")
        if not isinstance(link.reader, ZmqReader):
            raise ProtocolError("unrequested Data")
        places = self._machine.places(address, message)
        if all(place is None for place in places):
            return None  # no pull waits for it, or it is not of this source
        return link.reader.take(message, frame.buffer, places)

    def _take_news(self, address: str, news: FetchNews) -> list[SinkEffect]:
        now_s = self._clock.now_s()
        if isinstance(news, BlocksArrived):
            num_bytes = len(news.indices) * self._links[address].share_bytes
            self._count("pulled_blocks", num_bytes / self._block_bytes)
            self._count("pulled_bytes", num_bytes)
            are_good = news.sent_by_source or self._prove(address, news)
            return self._machine.fetched(
                address, news.lease_id, news.indices, now_s, are_good=are_good
            )
        log.warning("could not fetch blocks of lease %s: %s", news.lease_id, news.reason)
        self._count(f"failed_fetches:{news.reason.split(':')[0].replace(' ', '_')}", 1)
        if news.damaged:
            return self._machine.damaged(address, news.lease_id, news.indices, now_s)
        return self._machine.fetch_failed(address, news.lease_id, news.reason, now_s)

    def _prove(self, address: str, news: BlocksArrived) -> bool:
        """True if the lease was open after its blocks were copied, as its word says."""
        words = self._links[address].words
        if words is None:
            return False
        if news.word is None:
            self._count("fallbacks:lease_without_word", 1)
            return False
        return words.prove(news.word)

    # ------------------------------------------------------------ what follows

    def perform(self, effects: list[SinkEffect]) -> None:
        """Performs effects, and the effects that follow from them."""
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            match effect:
                case SendToSource():
                    self._outbox.append(effect)
                case UseSource():
                    todo += self._use_source(effect)
                case Fetch():
                    link = self._links[effect.address]
                    self._ask_sealed_again(effect.address, link)
                    reader = link.reader
                    assert reader is not None, "the source has not accepted us"
                    for news in reader.fetch(effect):
                        todo += self._take_news(effect.address, news)
                case CloseSource():
                    self._close_link(effect.address)
                case PullDone():
                    self._doubt_landings()
                    self._on_end(effect)
                case PullFailed():
                    self._doubt_landings()
                    self._fail(effect)

    def _doubt_landings(self) -> None:
        """A pull has ended, so what still comes for it must not be written."""
        for link in self._links.values():
            if link.sealed is not None:
                link.sealed.is_stale = True

    def _fail(self, failed: PullFailed) -> None:
        """Reports a failed pull once nothing writes to its blocks any more."""
        for reader in [*self._polled(), *self._closing]:
            if reader.is_writing(failed.seq_id):
                reader.cancel(failed.seq_id)
                self._ending[failed.seq_id] = (reader, failed)
                return
        self._on_end(failed)

    def _end_pulls(self) -> None:
        for seq_id, (reader, failed) in list(self._ending.items()):
            if not reader.is_writing(seq_id):
                del self._ending[seq_id]
                self._on_end(failed)
        for reader in [reader for reader in self._closing if not reader.num_reads]:
            self._closing.remove(reader)
            reader.close()

    # ------------------------------------------------------------ sources

    def _use_source(self, use: UseSource) -> list[SinkEffect]:
        link = self._links[use.address]
        if link.reader is not None or not use.wire.record_bytes:
            return []  # a repeated answer, or other ranks give us all we need
        refused: list[str] = []
        for way in WAYS[self._transport]:
            try:
                link.reader = self._open_reader(way, use)
            except _Unfit as error:
                refused.append(f"{way}: {error}")
                continue
            link.share_bytes = use.wire.wanted.block_bytes
            link.words = self._open_words(way, use)
            self._machine.use_transport(use.address, link.reader.means)
            why = "; ".join(refused) or "the first choice"
            log.info("pulling from %s over %s (%s)", use.address, way, why)
            return []
        log.warning("not pulling from %s: %s", use.address, "; ".join(refused))
        return self._machine.refuse_source(use.address, f"no transport: {refused[-1]}")

    def _open_reader(self, way: Transport, use: UseSource) -> Reader:
        """Raises _Unfit."""
        match way:
            case Transport.SHM:
                return self._open_shm(use)
            case Transport.IPC:
                return self._open_ipc(use)
            case Transport.NIXL:
                return self._open_nixl(use)
        if not use.source.offers.sends:
            raise _Unfit("source cannot send what is in a GPU's memory")
        link, pool = self._links[use.address], self._own_pool()
        reader = ZmqReader(use.wire, pool, lambda read: self._ask_for(use.address, read))
        link.target = Target(
            *(use.wire, pool, reader.means.batch_blocks),
            places=lambda data: self._machine.places(use.address, data),
        )
        link.sealed_port = use.source.offers.sealed_port
        self._ask_sealed(use.address, link)
        return reader

    def _ask_sealed(self, address: str, link: _Link) -> None:
        """Asks a source for a sealed stream, if both can."""
        link.seal_again_s = math.inf
        if link.sealed_port is None or not can_seal():
            self._fall_back(Transport.ZMQ, "unsealed")
            log.warning("blocks of %s come over CURVE, which is slower", address)
            return
        link.sealed = SealedLink()
        self._outbox.append(SendToSource(address, link.sealed.ask()))

    def _ask_sealed_again(self, address: str, link: _Link) -> None:
        if link.seal_again_s <= self._clock.now_s():
            self._ask_sealed(address, link)

    def _ask_for(self, address: str, read: Read) -> None:
        sealed = self._links[address].sealed
        if sealed is None or not sealed.read(read):
            self._outbox.append(SendToSource(address, read))

    def _open_words(self, way: Transport, use: UseSource) -> SourcesWords | None:
        """Maps the words of the source's leases, unless it sends its blocks or is elsewhere."""
        offer = use.source.offers.words
        if way is Transport.ZMQ or (offer is not None and offer.boot_id != boot_id()):
            return None
        words = SourcesWords()
        try:
            if offer is None:
                raise NoWords("source offers none")
            words.open(offer)
        except NoWords as error:
            self._fall_back(way, "without_words")
            log.warning("each pull from %s needs an answer to be done: %s", use.address, error)
            return None
        return words

    def _own_pool(self) -> Blocks | DeviceBlocks:
        if self._pool is None:
            raise _Unfit("KV here is in a GPU's memory")
        return self._pool

    def _open_shm(self, use: UseSource) -> Reader:
        pool = self._own_pool()
        offer = use.source.offers.shm
        if offer is None:
            if use.source.offers.ipc is None:  # else it has no memory of this kind
                self._fall_back(Transport.SHM, "not_offered")
            raise _Unfit("source offers no shared memory")
        try:
            block_bytes = use.source.identity.record.block_bytes
            blocks = map_offer(offer, use.source.num_blocks, block_bytes)
        except ShmUnavailable as error:
            self._fall_back(Transport.SHM, "unavailable")
            raise _Unfit(str(error)) from error
        if not isinstance(pool, DeviceBlocks):
            return ShmReader(use.wire, blocks, pool)
        kept = [blocks]
        return CopyReader(
            *(use.wire, pool, rows_of(blocks), len(blocks)),
            transport=Transport.SHM,
            let_go=kept.clear,
        )

    def _open_ipc(self, use: UseSource) -> Reader:
        pool, offer, source = self._pool, use.source.offers.ipc, use.source
        if not isinstance(pool, DeviceBlocks):
            raise _Unfit("KV here is not in a GPU's memory")
        if offer is None:
            if source.offers.shm is None:
                self._fall_back(Transport.IPC, "not_offered")
            raise _Unfit("source offers no memory of a GPU")
        if offer.boot_id != boot_id():
            raise _Unfit("source is on another host")
        block_bytes = source.identity.layout.block_bytes
        if offer.num_bytes != source.num_blocks * block_bytes:
            raise _Unfit("offered size does not match the layout")
        try:
            shared = SharedAddress(offer.handle, offer.offset)
            address = pool.driver.map(shared, offer.num_bytes)
        except DriverError as error:
            self._fall_back(Transport.IPC, "unavailable")
            raise _Unfit(str(error)) from error
        return CopyReader(
            *(use.wire, pool, Rows(address, block_bytes), source.num_blocks),
            transport=Transport.IPC,
            let_go=lambda: pool.driver.unmap(address),
        )

    def _open_nixl(self, use: UseSource) -> Reader:
        offer = use.source.offers.nixl
        if self._nixl is None:
            raise _Unfit("no RDMA device here")
        if offer is None:
            self._fall_back(Transport.NIXL, "not_offered")
            raise _Unfit("source is not on NIXL")
        if use.wire.pieces is None:
            self._fall_back(Transport.NIXL, "formats_differ")
            raise _Unfit("KV formats differ, and a one-sided read converts nothing")
        try:
            reader = self._nixl.connect(
                offer,
                use.source.num_blocks,
                record_bytes=use.source.identity.record.block_bytes,
                pieces=use.wire.pieces,
            )
        except NixlUnavailable as error:
            self._fall_back(Transport.NIXL, "unavailable")
            raise _Unfit(str(error)) from error
        return OneSidedReader(use.wire, reader)

    def _fall_back(self, way: Transport, reason: str) -> None:
        self._count(f"fallbacks:{way}_{reason}", 1)

    def _polled(self) -> list[PolledReader]:
        readers = [link.reader for link in self._links.values()]
        return [reader for reader in readers if isinstance(reader, PolledReader)]

    # ------------------------------------------------------------ sockets

    def send(self) -> None:
        """Sends the messages of this turn. It may wake another thread, so it comes last."""
        outbox, self._outbox = self._outbox, []
        for letter in outbox:
            try:
                link = self._links.get(letter.address) or self._open_link(letter.address)
                link.socket.send(encode(letter.message), zmq.NOBLOCK)
                self.has_mail = self.has_mail or has_mail(link.socket)
            except zmq.ZMQError as error:
                self._count("unsent_messages", 1)  # the source counts as silent soon
                log.warning("could not send a message to %s: %s", letter.address, error)

    def _open_link(self, address: str) -> _Link:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, b"sink" + secrets.token_bytes(12))
        socket.set(zmq.LINGER, 0)
        longest_bytes = max(self._block_bytes, FRAME_BYTES)
        secure_client(socket, self._secret, Channel.KV, max_message_bytes=longest_bytes)
        set_heartbeat(socket, self._timing)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        link = self._links[address] = _Link(socket)
        self._poller.register(socket, select.EPOLLIN)
        self.has_mail = True  # perhaps, before the descriptor was watched
        return link

    def _close_link(self, address: str) -> None:
        self._outbox = [letter for letter in self._outbox if letter.address != address]
        link = self._links.pop(address, None)
        if link is None:
            return
        self._poller.unregister(link.socket)
        if link.sealed is not None:
            link.sealed.close()
        link.socket.close(linger=0)
        if link.words is not None:
            link.words.close()
        if isinstance(link.reader, PolledReader) and link.reader.num_reads:
            self._closing.append(link.reader)
        elif link.reader is not None:
            link.reader.close()
