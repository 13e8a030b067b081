"""Sealed streams between endpoints, over which sources send blocks beside ZeroMQ.

CURVE encrypts less than 1 GiB/s in one thread, and a ZeroMQ frame passes through two more threads
and two more copies. So blocks, and the reads that ask for blocks, use a separate TCP connection:

    sink                      CURVE                      source
    AskSealed(name, word, key)  ──────────────────────>  keeps the key
                                <──────────────────────  MaySeal
    connects, name | word       ──────── TCP ─────────>  knows the sink
    Read                        ──────── sealed ──────>
                                <─────── sealed ───────  Data, its records; the next Data, …

Name, word and key are random. The key travels over CURVE only, so a recorded connection cannot be
decrypted later with the deployment's secret. A key serves one connection. An attacker who reads the
name and the word on the network can connect in the sink's place, but cannot decrypt the bytes.

Neither end blocks on the connection. In each step, an end sends or receives the records that the
connection accepts. The source checks the lease before each step. So each record that arrives was
sent while its lease was open.

Before the connection exists, blocks are sent over CURVE. Blocks are also sent over CURVE after the
connection breaks, or if C++ or libsodium is missing at one end; these cases are counted.
"""

import logging
import math
import os
import secrets
import select
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ProtocolError
from engine.worker.blocks import BlockId
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.lease.effects import Timing, UseSource
from kvtransfer.memory import Blocks
from kvtransfer.messages import AskSealed, Data, Read, ToSource, decode_to_sink, encode
from kvtransfer.native.stream import (
    KEY_BYTES,
    RecordFrame,
    SealedStream,
    StreamStop,
    agreed_lanes,
    can_seal,
)
from kvtransfer.packing import rows_to_receive, unpack
from kvtransfer.transports.seam import (
    BlocksArrived,
    BlocksFailed,
    FetchEnd,
    SourceFault,
    TransferContext,
)
from kvtransfer.wire import Wire

log = logging.getLogger(__name__)

BUDGET_BYTES = 8 * 2**20  # most bytes in one call before other connections and deadlines are served
GREETING_BYTES = 32  # size of a greeting, which is a name and a word
MAX_STEPS_PER_TURN = 64  # most steps for one source before other sources and deadlines are served
Places = Sequence[BlockId | None]
NO_PLACE = -1


class StreamLost(Exception):
    """The connection is lost, or received bytes do not come from the source."""


class Landing:
    """Records of one Data message that are being received into local blocks."""

    def __init__(self, data: Data, places: Places, wire: Wire, pool: Blocks | DeviceBlocks) -> None:
        """`places` has a local block for each record, or None if no pull waits for the block."""
        self.data = data
        self._places = list(places)
        self._wire = wire
        self._pool = pool
        self._num_here = 0
        rows = rows_to_receive(wire, pool)
        self._is_direct = rows is not None
        if rows is None:
            rows = np.empty((len(places), wire.record_bytes), np.uint8)
            self.frame = RecordFrame.of(rows, range(len(places)))
        else:
            self.frame = RecordFrame.of(rows, [NO_PLACE if p is None else p for p in places])

    def keep(self, places: Places) -> None:
        """Drops the records that have not arrived, and whose places have changed."""
        for row in range(self._num_here, len(places)):
            if places[row] != self._places[row]:
                self._places[row] = None
                if self._is_direct:
                    self.frame.ids[row] = NO_PLACE

    def arrive(self, num_records: int) -> tuple[int, ...]:
        """Handles the arrival of the first `num_records` records.

        Returns the indices of the blocks that are newly in place.
        """
        if not self._is_direct and num_records < len(self._places):
            return ()
        rows = range(self._num_here, num_records)
        placed = [row for row in rows if self._places[row] is not None]
        self._num_here = num_records
        if placed and not self._is_direct:
            blocks = [place for place in self._places if place is not None]
            unpack(self._wire, self.frame.records, placed, self._pool, blocks)
        return tuple([self.data.indices[row] for row in placed])

    @property
    def is_over(self) -> bool:
        """True once all records have arrived."""
        return self._num_here == len(self._places)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The indices of the wanted blocks that have not arrived yet."""
        rows = range(self._num_here, len(self._places))
        return tuple([self.data.indices[row] for row in rows if self._places[row] is not None])


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about a sink and a source that the sink's stream needs."""

    wire: Wire
    pool: Blocks | DeviceBlocks
    max_blocks: int  # most blocks in one Data message
    places: Callable[[Data], Places]


class SealedLink:
    """A sink's connection to a source."""

    def __init__(self) -> None:
        """Makes no connection: call `connect` once the source has answered the message `ask`."""
        half = GREETING_BYTES // 2
        self.ask = AskSealed(
            secrets.token_bytes(half),
            secrets.token_bytes(half),
            secrets.token_bytes(KEY_BYTES),
            agreed_lanes(),
        )
        self._lanes = 1
        self._connection: socket.socket | None = None
        self._stream: SealedStream | None = None  # None until the connection exists
        self._is_blocked = False  # True while read messages wait until the connection accepts them
        self.landing: Landing | None = None
        self.is_stale = False  # True if places may have changed since the Data arrived
        self.has_more = False  # True if data may be waiting that no descriptor reports

    def connect(
        self, address: str, port: int, poller: select.epoll, timing: Timing, *, lanes: int
    ) -> None:
        """Starts to connect to the source at `address`. The source seals with `lanes` lanes.

        Raises OSError.
        """
        host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind)
        try:
            prepare(connection, timing)
            connection.connect(place)
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            raise
        self._connection, self._poller, self._lanes = connection, poller, lanes
        poller.register(connection, select.EPOLLOUT)

    def fileno(self) -> int:
        """The connection's descriptor; -1 without one."""
        return -1 if self._connection is None else self._connection.fileno()

    def read(self, message: Read) -> bool:
        """Asks the source for blocks. Returns False if this message must be sent over CURVE."""
        if self._stream is None or not self._stream.note(encode(message)):
            return False
        return self._flush() is not StreamStop.LOST

    def _flush(self) -> StreamStop:
        """Sends the queued messages, or waits until the connection accepts them."""
        assert self._stream is not None
        stop = self._stream.send(None, BUDGET_BYTES)
        if (stop is StreamStop.BLOCKED) != self._is_blocked:
            self._is_blocked = not self._is_blocked
            also = select.EPOLLOUT if self._is_blocked else 0
            self._poller.modify(self._stream, select.EPOLLIN | also)
        return stop

    def receive(self, target: Target, *, may_wait: bool) -> tuple[Data, tuple[int, ...]] | None:
        """Receives records up to the next Data. Raises StreamLost and ProtocolError.

        Returns the current Data, and the indices of its blocks that are newly in place.
        """
        if self._stream is None:
            self._greet()
            return None
        if self._is_blocked:
            self._flush()
        landing = self.landing
        if landing is not None and self.is_stale:
            landing.keep(target.places(landing.data))
        self.is_stale = False
        frame = None if landing is None else landing.frame
        stop, num = self._stream.receive(frame, BUDGET_BYTES, may_wait=may_wait)
        # if BLOCKED, the descriptor will report more
        self.has_more = stop is not StreamStop.BLOCKED
        arrived = None
        if landing is not None:
            arrived = landing.data, landing.arrive(num)
            if landing.is_over:
                self.landing = None
        if stop is StreamStop.NOTE:
            self.landing = self._land(target)
        elif stop in (StreamStop.LOST, StreamStop.BAD) and not (arrived and arrived[1]):
            raise StreamLost("damaged" if stop is StreamStop.BAD else "lost")
        return arrived

    def _greet(self) -> None:
        """Sends the greeting that names this sink, once the connection exists. Raises
        StreamLost.
        """
        assert self._connection is not None
        number = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise StreamLost(os.strerror(number))
        greeting = self.ask.name + self.ask.word
        try:
            done = self._connection.send(greeting) == len(greeting)
        except BlockingIOError:
            return  # the system has not completed the connection yet
        except OSError as error:
            raise StreamLost(str(error)) from error
        if not done:
            raise StreamLost("a new connection takes no 32 bytes")
        self._stream = SealedStream(
            self._connection,
            self.ask.key,
            is_source=False,
            others=self._poller.fileno(),
            lanes=self._lanes,
        )
        self._poller.modify(self._connection, select.EPOLLIN)

    def _land(self, target: Target) -> Landing:
        assert self._stream is not None
        data = decode_to_sink(self._stream.received_note)
        if not isinstance(data, Data):
            raise ProtocolError("sealed notes are Data only")
        if not 0 < len(data.indices) <= target.max_blocks:
            raise ProtocolError("more blocks than were asked for, or none")
        return Landing(data, target.places(data), target.wire, target.pool)

    def close(self) -> None:
        """Closes the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._poller.unregister(connection)
            connection.close()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@dataclass(slots=True)
class _Source:
    """A source that sends its blocks."""

    target: Target
    port: int | None
    link: SealedLink | None = None
    ask_again_s: float = math.inf  # time at which to ask the source for another stream
    num_ended: int = 0  # value of `SealedSink.num_ended` when data was last received


class SealedSink:
    """The sealed streams from all sources of an endpoint."""

    def __init__(
        self,
        context: TransferContext,
        *,
        places: Callable[[str, Data], Places],
        post: Callable[[str, ToSource], None],
    ) -> None:
        """`places` returns the local places of a Data from an address. `post` sends over CURVE."""
        self._places = places
        self._post = post
        self._count = context.count
        self._timing = context.timing
        self._clock = context.clock
        self._poller = context.poller
        self._sources: dict[str, _Source] = {}  # sources by address
        self.num_ended = 0  # number of ended pulls, whose places must not be written any more

    @property
    def has_more(self) -> bool:
        """True if received blocks may be waiting that no descriptor reports."""
        links = [source.link for source in self._sources.values()]
        return any(link is not None and link.has_more for link in links)

    def open(self, use: UseSource, pool: Blocks | DeviceBlocks, *, max_blocks: int) -> None:
        """Adds a source, and asks the source for a stream if both ends can seal."""
        address = use.address
        target = Target(use.wire, pool, max_blocks, lambda data: self._places(address, data))
        self._sources[address] = _Source(target, use.source.offers.sealed_port)
        self._ask(address)

    def connect(self, address: str, lanes: int) -> None:
        """Connects to a source that has agreed to provide a stream."""
        source = self._sources.get(address)
        if source is None or source.link is None or source.link.fileno() >= 0:
            return  # the source has answered a second time
        assert source.port is not None
        try:
            source.link.connect(address, source.port, self._poller, self._timing, lanes=lanes)
        except OSError as error:
            self._lose(address, source.link, str(error))

    def read(self, address: str, read: Read) -> bool:
        """Asks the source for blocks. Returns False if the message must be sent over CURVE."""
        source = self._sources[address]
        if source.ask_again_s <= self._clock.now_s():
            self._ask(address)
        return source.link is not None and source.link.read(read)

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchEnd]:
        """Returns the blocks that have arrived. For each source, reading stops at the first new
        blocks.
        """
        news: list[FetchEnd] = []
        for address, source in list(self._sources.items()):
            link = source.link
            if link is not None and (link.fileno() in ready or link.has_more):
                link.is_stale = link.is_stale or source.num_ended != self.num_ended
                source.num_ended = self.num_ended
                news += self._receive(address, link, source.target, may_wait=may_wait)
        return news

    def close(self, address: str) -> None:
        """Closes the stream of a source."""
        source = self._sources.pop(address, None)
        if source is not None and source.link is not None:
            source.link.close()

    def _ask(self, address: str) -> None:
        source = self._sources[address]
        source.ask_again_s = math.inf
        if source.port is None or not can_seal():
            self._count("fallbacks:zmq_unsealed", 1)
            log.warning("blocks of %s come over CURVE, which is slower", address)
            return
        source.link = SealedLink()
        self._post(address, source.link.ask)

    def _receive(
        self, address: str, link: SealedLink, target: Target, *, may_wait: bool
    ) -> list[FetchEnd]:
        news: list[FetchEnd] = []
        for _ in range(MAX_STEPS_PER_TURN):
            try:
                landed = link.receive(target, may_wait=may_wait)
            except ProtocolError as error:
                return [*news, SourceFault(address, error)]
            except StreamLost as error:
                return [*news, *self._lose(address, link, str(error))]
            if landed is not None:
                data, indices = landed
                news.append(BlocksArrived(address, data.lease_id, indices, data=data))
            if not link.has_more or (landed is not None and landed[1]):
                break
        return news

    def _lose(self, address: str, link: SealedLink, reason: str) -> list[FetchEnd]:
        """Closes a lost stream. Until a new stream exists, blocks arrive over CURVE."""
        source, landing = self._sources[address], link.landing
        link.close()
        source.link = None
        source.ask_again_s = self._clock.now_s() + self._timing.silence_s
        self._count("fallbacks:zmq_unsealed", 1)
        log.warning("the sealed stream of %s has ended: %s", address, reason)
        if landing is None or not landing.awaited:
            return []
        what = address, landing.data.lease_id, landing.awaited
        return [BlocksFailed(*what, reason, damaged=True)]


def prepare(connection: socket.socket, timing: Timing) -> None:
    """Makes a connection non-blocking. The system closes it if the peer has vanished."""
    connection.settimeout(0)
    silence_ms = max(1, int(1000 * timing.silence_s))
    for level, option, number in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(timing.silence_s))),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timing.hold_every_s))),
    ):
        connection.setsockopt(level, option, number)
