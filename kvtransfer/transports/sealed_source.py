"""The source's end of sealed streams: a listener, and a line to each sink that asked for a
stream.
"""

import select
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hmac import compare_digest

import numpy as np

from engine.errors import ProtocolError
from engine.worker.blocks import BlockId
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.lease.effects import Peer, SendBlocks
from kvtransfer.memory import Blocks
from kvtransfer.messages import AskSealed, Data, Read, decode_to_source, encode
from kvtransfer.native.stream import RecordFrame, SealedStream, StreamStop, agreed_lanes
from kvtransfer.packing import pack, rows_to_send
from kvtransfer.transports.sealed import BUDGET_BYTES, GREETING_BYTES, prepare
from kvtransfer.transports.seam import FRAME_BYTES, TransferContext, num_records

GREETING_S = 5.0  # longest time until a new connection names its sink, seconds
MAX_GUESTS = 64  # most connections without a named sink; a further one closes the oldest
MAX_LINES = 4096
MAX_NOTES_PER_TURN = 64  # most notes of one sink that are handled in a row


@dataclass(slots=True)
class _Guest:
    """A connection whose sink is not known yet."""

    connection: socket.socket
    until_s: float
    greeting: bytes = b""


@dataclass(slots=True)
class _Line:
    """The source's stream to one sink."""

    ask: AskSealed
    stream: SealedStream | None = None  # None until the sink is connected
    is_blocked: bool = False  # True until the connection accepts more data
    has_more: bool = False  # True if notes may be waiting that no descriptor reports
    read: SendBlocks | None = None  # the read that the source is answering
    num_begun: int = 0  # number of blocks of the read whose sending has started
    frame: RecordFrame | None = None  # the blocks that are being sent now


class SealedSource:
    """The sealed streams of a source."""

    def __init__(self, context: TransferContext) -> None:
        self._count = context.count
        self._timing = context.timing
        self._clock = context.clock
        self._poller = context.poller
        self._listener: socket.socket | None = None
        self.port: int | None = None  # TCP port for sinks, set by `listen`
        self._lines: dict[Peer, _Line] = {}  # by the sink's routing id, oldest first
        # routing id of each sink, by the name that its greeting will have
        self._peers: dict[bytes, Peer] = {}
        self._connected: dict[int, Peer] = {}  # routing id of each connected sink, by descriptor
        # connections without a named sink, by descriptor, oldest first
        self._guests: dict[int, _Guest] = {}

    def listen(self, host: str) -> None:
        """Listens on a port that the system chooses. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_GUESTS)
        self._listener.settimeout(0)
        self.port = self._listener.getsockname()[1]
        self._poller.register(self._listener, select.EPOLLIN)

    def stop(self) -> None:
        """Closes all connections, and drops all keys."""
        for peer in list(self._lines):
            self.dismiss(peer)
        for fd in list(self._guests):
            self._send_away(fd)
        if self._listener is not None:
            self._listener.close()

    # ------------------------------------------------------------ sinks

    def admit(self, peer: Peer, ask: AskSealed) -> None:
        """Allows a sink to connect once. Closes the sink's existing connection."""
        self.dismiss(peer)
        if len(self._lines) >= MAX_LINES:
            self.dismiss(next(iter(self._lines)))
        self._lines[peer] = _Line(ask)
        self._peers[ask.name] = peer

    def dismiss(self, peer: Peer) -> None:
        """Closes the stream to a sink."""
        line = self._lines.pop(peer, None)
        if line is None:
            return
        self._peers.pop(line.ask.name, None)
        if line.stream is not None:
            del self._connected[line.stream.fileno()]
            self._poller.unregister(line.stream)
            line.stream.close()

    def is_connected(self, peer: Peer) -> bool:
        """True if a sink is connected, so that it gets its blocks over the stream."""
        line = self._lines.get(peer)
        return line is not None and line.stream is not None

    def can_send(self, peer: Peer) -> bool:
        """False while a sink's stream accepts no more data."""
        line = self._lines.get(peer)
        return line is None or not line.is_blocked

    @property
    def has_more(self) -> bool:
        """True if reads may be waiting that no descriptor reports."""
        return any(line.has_more for line in self._lines.values())

    # ------------------------------------------------------------ receiving

    def receive(self, ready: Collection[int]) -> Iterator[tuple[Peer, Read | ProtocolError]]:
        """Yields the reads from ready connections. An invalid read yields an error instead."""
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)
        for fd in [fd for fd in self._guests if fd in ready]:
            self._greet(fd)
        now_s = self._clock.now_s()
        for fd in [fd for fd, guest in self._guests.items() if guest.until_s <= now_s]:
            self._send_away(fd)
        for fd, peer in list(self._connected.items()):
            line = self._lines.get(peer)
            if line is not None and (fd in ready or line.has_more):
                yield from self._receive_of(peer, line)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_GUESTS):
            try:
                connection, _ = listener.accept()
                prepare(connection, self._timing)
            except BlockingIOError:
                return
            except OSError:  # the peer has disconnected, or no descriptors are left
                self._count("refused_connections:cannot be accepted", 1)
                return
            if len(self._guests) >= MAX_GUESTS:
                self._send_away(next(iter(self._guests)))
            fd = connection.fileno()
            self._guests[fd] = _Guest(connection, self._clock.now_s() + GREETING_S)
            self._poller.register(fd, select.EPOLLIN)

    def _greet(self, fd: int) -> None:
        """Receives a greeting. A correct greeting connects the sink; any other closes the
        connection.
        """
        guest = self._guests[fd]
        try:
            said = guest.connection.recv(GREETING_BYTES - len(guest.greeting))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        guest.greeting += said
        if said and len(guest.greeting) < GREETING_BYTES:
            return
        peer = self._known(guest.greeting)
        if peer is None:
            self._count("refused_connections:wrong pass", 1)
            self._send_away(fd)
            return
        del self._guests[fd]
        line = self._lines[peer]
        line.stream = SealedStream(
            guest.connection,
            line.ask.key,
            is_source=True,
            others=self._poller.fileno(),
            lanes=agreed_lanes(line.ask.lanes),
        )
        self._connected[fd] = peer

    def _known(self, greeting: bytes) -> Peer | None:
        half = GREETING_BYTES // 2
        peer = self._peers.get(greeting[:half])
        if peer is None or not compare_digest(greeting[half:], self._lines[peer].ask.word):
            return None
        return None if self.is_connected(peer) else peer

    def _send_away(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._guests.pop(fd).connection.close()

    def _receive_of(self, peer: Peer, line: _Line) -> Iterator[tuple[Peer, Read | ProtocolError]]:
        self._unblock(line)
        for _ in range(MAX_NOTES_PER_TURN):
            if line.stream is None or self._lines.get(peer) is not line:
                return
            stop, _ = line.stream.receive(None, BUDGET_BYTES)
            line.has_more = stop is StreamStop.NOTE
            if stop in (StreamStop.LOST, StreamStop.BAD):
                self._lose(peer)
                return
            if stop is not StreamStop.NOTE:
                return
            yield peer, _read(line.stream.received_note)

    def _lose(self, peer: Peer) -> None:
        self._count("fallbacks:zmq_unsealed", 1)
        self.dismiss(peer)

    # ------------------------------------------------------------ blocks

    def send(self, read: SendBlocks, pool: Blocks | DeviceBlocks, *, may_wait: bool) -> bool:
        """Continues to send the blocks of a connected sink's read. Returns True once all are sent.

        A call with another read abandons the rest of the current read.
        """
        line = self._lines[read.peer]
        if line.read is not read:
            line.read, line.num_begun, line.frame = read, 0, None
        while line.frame is not None or line.num_begun < len(read.indices):
            # without a frame, only bytes that are queued already are sent
            frame = line.frame or self._begin(line, read, pool)
            if not self._go_on(line, frame, may_wait=may_wait):
                return False
            line.frame = None
        line.read = None
        return True

    def _begin(
        self, line: _Line, read: SendBlocks, pool: Blocks | DeviceBlocks
    ) -> RecordFrame | None:
        """Starts a frame of the next blocks: all remaining blocks, or as many as are packed at
        once.

        Returns None if the unsent rest of an abandoned read leaves no room.
        """
        assert line.stream is not None
        rows = rows_to_send(read.wire, pool)
        first, end = line.num_begun, len(read.indices)
        if rows is None:
            end = min(end, first + num_records(FRAME_BYTES, read.wire))
        if not line.stream.note(encode(Data(read.lease_id, list(read.indices[first:end]), 0))):
            return None
        ids = read.block_ids[first:end]
        if rows is None:
            rows = np.empty((len(ids), read.wire.record_bytes), np.uint8)
            pack(read.wire, pool, ids, rows)
            ids = tuple(map(BlockId, range(len(ids))))
        line.num_begun = end
        line.frame = RecordFrame.of(rows, ids)
        return line.frame

    def _go_on(self, line: _Line, frame: RecordFrame | None, *, may_wait: bool) -> bool:
        """Sends more of a frame. Returns True once the whole frame is sent."""
        assert line.stream is not None
        stop = line.stream.send(frame, BUDGET_BYTES, may_wait=may_wait)
        if stop is StreamStop.BLOCKED:
            line.is_blocked = True
            self._poller.modify(line.stream, select.EPOLLIN | select.EPOLLOUT)
        elif stop is StreamStop.LOST:
            self._lose(self._connected[line.stream.fileno()])
        return stop is StreamStop.DONE

    def _unblock(self, line: _Line) -> None:
        if line.is_blocked and line.stream is not None:
            line.is_blocked = False
            self._poller.modify(line.stream, select.EPOLLIN)


def _read(note: bytes) -> Read | ProtocolError:
    try:
        message = decode_to_source(note)
    except ProtocolError as error:
        return error
    return message if isinstance(message, Read) else ProtocolError("sealed notes are reads only")
