"""Sealed blocks: those that a source sends over a second ZeroMQ socket, which does not encrypt.

CURVE encrypts less than 1 GiB/s in one thread. AES-GCM of libcrypto encrypts 3 to 4 GiB/s, from the
pool into the frame and from the frame into the pool, so it also replaces two copies and a checksum.

    sink                     CURVE                     source
    AskSealed(name, word, key)  ───────────────────>   lets that name in, keeps the key
                                <───────────────────   MaySeal
    connects with name, word    ───── PLAIN ───────>   socket for sealed blocks
                                <───── frames ──────   blocks

All three are random, and travel over CURVE only: so a recorded connection cannot be decrypted later
with the deployment's secret. A frame of one message:

    number (8) | bytes of the header (4) | sealed Data, tag (16) | sealed records, tag (16)

Its two boxes have the numbers 2 n and 2 n + 1. A sink takes a frame only if its number is higher
than the one before. Who reads the name and the word on the network can connect in the sink's place,
and gets frames that it cannot open.

Until the sink is connected, blocks come as before, over CURVE. So they do if the connection breaks,
or if C++ or libcrypto is missing at an end; that is counted.
"""

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import zmq

from engine.errors import ProtocolError
from engine.net.curve import PASS_BYTES, Doorkeeper, Pass, pass_only_server, show_pass
from engine.worker.blocks import BlockId
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.lease.effects import Peer, SendBlocks
from kvtransfer.memory import Blocks
from kvtransfer.messages import AskSealed, Data, decode_to_sink, encode
from kvtransfer.native.sealing import KEY_BYTES, TAG_BYTES, Opener, Sealer
from kvtransfer.packing import pack, unpack
from kvtransfer.records import RecordPiece
from kvtransfer.wire import Wire

PREFIX = struct.Struct("<QI")  # number of the frame, bytes of its header
MAX_LINES = 4096  # to sinks
MAX_FROM_SINK_BYTES = 64  # a sink sends nothing here


@dataclass(slots=True)
class _Line:
    """The way to one sink."""

    sinks_pass: Pass
    sealer: Sealer
    is_connected: bool = False


class SealedSource:
    """A source's socket for sealed blocks."""

    def __init__(self, doorkeeper: Doorkeeper, count: Callable[[str], None]) -> None:
        self._doorkeeper = doorkeeper
        self._count = count
        self._lines: dict[Peer, _Line] = {}  # oldest first
        self._next_number = 0  # of a frame to any sink

    def open(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        host: str,
        *,
        prepare: Callable[["zmq.Socket[bytes]"], None],
    ) -> None:
        """Prepares and binds the socket, to `port`."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a lost peer is an error
        self.socket.set(zmq.ROUTER_HANDOVER, 1)  # a sink that reconnects is the same sink
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, 1)
        pass_only_server(self.socket, max_message_bytes=MAX_FROM_SINK_BYTES)
        prepare(self.socket)
        self.port = self.socket.bind_to_random_port(f"tcp://{host}")

    def admit(self, peer: Peer, ask: AskSealed) -> None:
        """Lets a sink connect. It has one connection at a time."""
        self.dismiss(peer)
        if len(self._lines) >= MAX_LINES:
            self.dismiss(next(iter(self._lines)))
        line = self._lines[peer] = _Line(Pass(ask.name, ask.word), Sealer(ask.key))
        self._doorkeeper.admit(line.sinks_pass)

    def dismiss(self, peer: Peer) -> None:
        """Lets a sink connect no more."""
        line = self._lines.pop(peer, None)
        if line is not None:
            self._doorkeeper.dismiss(line.sinks_pass)
            line.sealer.close()

    def begin(self, peer: Peer) -> bool:
        """Begins a message to a sink, which `send` must end. Returns False if it cannot get any."""
        line = self._lines.get(peer)
        if line is None:
            return False
        try:
            self.socket.send(line.sinks_pass.name, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.ZMQError:
            if line.is_connected:
                self._count("fallbacks:zmq_unsealed")
            line.is_connected = False
            return False
        line.is_connected = True
        return True

    def send(
        self, read: SendBlocks, header: bytes, pool: Blocks | DeviceBlocks, out: Blocks
    ) -> zmq.MessageTracker:
        """Seals blocks into `out`, of `num_sealed` bytes, and sends it.

        The tracker says when ZeroMQ is done with it.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        sealer = self._lines[read.peer].sealer
        begin = PREFIX.size + len(header) + TAG_BYTES
        out[: PREFIX.size] = np.frombuffer(PREFIX.pack(number, len(header)), np.uint8)
        sealer.seal(2 * number, header, out[PREFIX.size : begin])
        frame = out[begin:-TAG_BYTES].reshape(len(read.block_ids), read.wire.record_bytes)
        _seal(sealer, 2 * number + 1, read, pool, frame=frame, tag=out[-TAG_BYTES:])
        tracker = self.socket.send(out.data, zmq.NOBLOCK, copy=False, track=True)
        assert isinstance(tracker, zmq.MessageTracker)
        return tracker

    def close(self) -> None:
        """Closes the socket, and forgets all keys."""
        for peer in list(self._lines):
            self.dismiss(peer)
        self.socket.close(linger=0)


def num_sealed(header: bytes, num_bytes: int) -> int:
    """Returns the length of a frame with so many bytes of records."""
    return PREFIX.size + len(header) + num_bytes + 2 * TAG_BYTES


def _seal(
    sealer: Sealer,
    number: int,
    read: SendBlocks,
    pool: Blocks | DeviceBlocks,
    *,
    frame: Blocks,
    tag: Blocks,
) -> None:
    wire, ids = read.wire, read.block_ids
    if isinstance(pool, DeviceBlocks) or wire.stored.kv_format != wire.travels_as:
        pack(wire, pool, ids, frame)
        sealer.seal_records(number, frame, tag, frame, range(len(ids)), _whole(wire))
    else:
        sealer.seal_records(number, frame, tag, pool, ids, wire.packing)


class SealedLink:
    """A sink's connection to a source's socket for sealed blocks."""

    def __init__(self) -> None:
        """The connection is made by `connect`, once the source has answered `ask`."""
        self._pass = Pass(secrets.token_bytes(PASS_BYTES), secrets.token_bytes(PASS_BYTES))
        self._key = secrets.token_bytes(KEY_BYTES)
        self._last_number = -1
        self.socket: zmq.Socket[bytes] | None = None

    def ask(self) -> AskSealed:
        """Returns the message for the source."""
        return AskSealed(self._pass.name, self._pass.word, self._key)

    def connect(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        port: int,
        *,
        max_frame_bytes: int,
    ) -> "zmq.Socket[bytes]":
        """Connects to the port of the source at `address`. Raises ZMQError."""
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, self._pass.name)
        socket.set(zmq.LINGER, 0)
        show_pass(socket, self._pass, max_message_bytes=max_frame_bytes)
        try:
            socket.connect(f"{address.rpartition(':')[0]}:{port}")
        except zmq.ZMQError:
            socket.close()
            raise
        self._opener = Opener(self._key)
        self.socket = socket
        return socket

    def receive(self) -> "SealedFrame":
        """Receives a frame and opens its header. Raises ProtocolError."""
        assert self.socket is not None
        message = self.socket.recv(copy=False)
        if self.socket.get(zmq.RCVMORE):
            raise ProtocolError("a sealed frame has one part")
        frame = np.frombuffer(message.buffer, np.uint8)
        if len(frame) < PREFIX.size + 2 * TAG_BYTES:
            raise ProtocolError("a sealed frame is too short")
        number, header_bytes = PREFIX.unpack(frame[: PREFIX.size].tobytes())
        begin = PREFIX.size + header_bytes + TAG_BYTES
        if not self._last_number < number < 2**62 or len(frame) < begin + TAG_BYTES:
            raise ProtocolError("a sealed frame has a wrong number or length")
        header = self._opener.open(2 * number, frame[PREFIX.size : begin])
        if header is None:
            raise ProtocolError("a sealed frame is not its source's")
        self._last_number = number
        data = decode_to_sink(header)
        if not isinstance(data, Data):
            raise ProtocolError("sealed frames hold blocks only")
        return SealedFrame(data, self._opener, 2 * number + 1, frame[begin:])

    def close(self) -> None:
        """Closes the connection."""
        if self.socket is not None:
            self.socket.close(linger=0)
            self._opener.close()


class SealedFrame(NamedTuple):
    """A frame whose header has been opened."""

    data: Data
    opener: Opener
    number: int
    box: Blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of its records."""
        return len(self.box) - TAG_BYTES

    def open(
        self, wire: Wire, pool: Blocks | DeviceBlocks, places: Sequence[BlockId | None]
    ) -> bool:
        """Opens the records into their places. Returns False if they were changed on the way.

        That is known only after they are in place. A record without a place is left out.
        """
        records = self.box[:-TAG_BYTES].reshape(len(places), wire.record_bytes)
        tag = self.box[-TAG_BYTES:]
        if isinstance(pool, DeviceBlocks) or wire.travels_as != wire.wanted.kv_format:
            opened = np.empty_like(records)
            rows = range(len(places))
            if not self.opener.open_records(
                *(self.number, records, tag, opened, rows, _whole(wire))
            ):
                return False
            placed = [row for row, place in enumerate(places) if place is not None]
            unpack(wire, opened, placed, pool, [p for p in places if p is not None])
            return True
        ids = [-1 if place is None else place for place in places]
        return self.opener.open_records(self.number, records, tag, pool, ids, wire.unpacking)


def _whole(wire: Wire) -> tuple[RecordPiece, ...]:
    return (RecordPiece(0, 0, wire.record_bytes),)


def encode_header(read: SendBlocks) -> bytes:
    """Returns the header of a frame. Its tag takes the place of a checksum."""
    return encode(Data(read.lease_id, list(read.indices), 0))
