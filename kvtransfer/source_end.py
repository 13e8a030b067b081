"""The source's side of an endpoint: a ROUTER socket to which sinks connect.

Blocks go over the sink's sealed stream (`kvtransfer.stream`), if it has one. Otherwise they are
gathered into staging buffers, from which ZeroMQ sends without another copy. The buffers bound the
memory that a source holds for its sinks: reads wait, sink by sink, until one is free, or until the
stream takes more. A read whose lease ended meanwhile is dropped; its sink has been told.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np
import zmq

from engine.errors import ProtocolError
from engine.net.curve import Channel, secure_server
from engine.net.trust import Secret
from engine.worker.events import LeaseEnded
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.lease.effects import Peer, SendBlocks, SendToSink, SetWord, SourceEffect
from kvtransfer.lease.source import SourceMachine
from kvtransfer.lease.terms import Timing
from kvtransfer.lease_words import LeaseWords
from kvtransfer.memory import Blocks
from kvtransfer.messages import (
    AskSealed,
    Data,
    LeaseMessage,
    MaySeal,
    decode_to_source,
    encode,
)
from kvtransfer.native.stream import agreed_lanes
from kvtransfer.packing import pack
from kvtransfer.readers import FRAME_BYTES, num_records
from kvtransfer.stream.source import SealedSource

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**16  # of a sink, which sends no payload
MAX_UNREAD_MESSAGES = 1024  # of one sink; a sink with more is cut off
MAX_MESSAGES_PER_TURN = 64  # then sources and deadlines have their turn
MAX_FRAMES_PER_TURN = 16  # to each sink
MAX_BUFFERS_PER_SINK = 3  # one is filled while ZeroMQ sends the others; few stay in caches
MAX_BUFFERS = 64
MAX_QUEUED_READS = 256  # of one sink; it asks again for dropped ones


class Staging:
    """Buffers of one frame each, reused once ZeroMQ has sent their contents."""

    def __init__(self, allocate: Callable[[int], Blocks]) -> None:
        self._allocate = allocate
        self._free: list[Blocks] = []
        self._sending: list[tuple[zmq.MessageTracker, Peer, Blocks]] = []  # oldest first

    def take(self, peer: Peer, num_bytes: int) -> Blocks | None:
        """Returns a buffer of at least so many bytes for that sink; None while it must wait."""
        still = []
        for tracker, holder, buffer in self._sending:  # ask each once: it may end meanwhile
            if tracker.done:
                self._free.append(buffer)
            else:
                still.append((tracker, holder, buffer))
        self._sending = still
        if sum(holder == peer for _, holder, _ in self._sending) >= MAX_BUFFERS_PER_SINK:
            return None
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= num_bytes:
                return buffer
        if len(self._sending) >= MAX_BUFFERS:
            return None
        return self._allocate(max(num_bytes, FRAME_BYTES))  # fits any frame of small blocks

    def lend(self, buffer: Blocks, peer: Peer, tracker: zmq.MessageTracker) -> None:
        """Marks a buffer as being sent."""
        self._sending.append((tracker, peer, buffer))

    def wait(self, timeout_s: float) -> None:
        """Waits until the oldest buffer is sent, for at most `timeout_s`."""
        if self._sending:
            with contextlib.suppress(zmq.NotDone):
                self._sending[0][0].wait(timeout_s)


class SourceEnd:
    """Performs the effects of the source's machine. Owned by the transfer thread."""

    def __init__(  # noqa: PLR0913 - wiring
        self,
        machine: SourceMachine,
        pool: Blocks | DeviceBlocks | None,
        *,
        words: LeaseWords | None,
        sealed: SealedSource | None,
        timing: Timing,
        on_ended: Callable[[LeaseEnded], None],
        count: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._pool = pool
        self._words = words
        self._sealed = sealed
        self._timing = timing
        self._on_ended = on_ended
        self._count = count
        pinned = pool.driver.pinned if isinstance(pool, DeviceBlocks) else _host_bytes
        self._staging = Staging(pinned)
        self._queued: dict[Peer, deque[SendBlocks]] = {}
        self._lacks_buffer = False
        self._may_wait = False
        self.has_mail = False  # messages may wait that no descriptor reports

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]", secret: Secret, host: str) -> str:
        """Binds the socket; returns where sinks connect."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a lost peer is an error
        self.socket.set(zmq.ROUTER_HANDOVER, 1)  # a sink that reconnects is the same sink
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        secure_server(self.socket, secret, Channel.KV, max_message_bytes=MAX_MESSAGE_BYTES)
        set_heartbeat(self.socket, self._timing)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        return f"tcp://{host}:{port}"

    def close(self) -> None:
        """Closes the socket and lets go of the pool. Unsent messages are dropped."""
        if self._words is not None:
            self._words.close()
        if self._sealed is not None:
            self._sealed.close()
        self.socket.close(linger=0)
        del self._pool

    @property
    def has_work(self) -> bool:
        """True if blocks wait to be sent, and no descriptor will tell when they can be."""
        sealed = self._sealed
        if sealed is None:
            return bool(self._queued)
        return sealed.has_more or any(sealed.can_send(peer) for peer in self._queued)

    def receive(self, handle: Callable[[Peer, LeaseMessage], None], ready: Collection[int]) -> None:
        """Takes a limited number of messages. A sink that sends an invalid one is cut off.

        `ready` are the descriptors that can be read or written.
        """
        for peer, read in self._sealed.receive(ready) if self._sealed is not None else ():
            if isinstance(read, ProtocolError):
                self._refuse(peer, read)
            else:
                handle(peer, read)
        self.has_mail = False
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not has_mail(self.socket):
                return
            peer = self.socket.recv(zmq.NOBLOCK)
            try:
                message = decode_to_source(self._only_frame())
            except ProtocolError as error:
                self._refuse(peer, error)
                continue
            if isinstance(message, AskSealed):
                self._admit(peer, message)
            else:
                handle(peer, message)
        self.has_mail = True  # perhaps

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        self._count("bad_messages")
        log.warning("cut off a sink: %s", error)
        self._send_away(peer, "bad message")

    def _send_away(self, peer: Peer, reason: str) -> None:
        if self._sealed is not None:
            self._sealed.dismiss(peer)
        self.perform(self._machine.send_away(peer, reason))

    def _admit(self, peer: Peer, ask: AskSealed) -> None:
        if self._sealed is not None and self._machine.is_attached(peer):
            self._sealed.admit(peer, ask)
            self._send(peer, encode(MaySeal(agreed_lanes(ask.lanes))))

    def _only_frame(self) -> bytes:
        frame = self.socket.recv() if self.socket.get(zmq.RCVMORE) else b""
        if not self.socket.get(zmq.RCVMORE):
            return frame
        drain(self.socket)
        raise ProtocolError("a sink's message must have one frame")

    def perform(self, effects: list[SourceEffect]) -> None:
        """Performs effects. Blocks wait for `send_blocks`."""
        for effect in effects:
            match effect:
                case SendToSink():
                    self._send(effect.peer, encode(effect.message))
                case SendBlocks():
                    self._queue(effect)
                case SetWord():
                    assert self._words is not None, "words are used if they were offered"
                    self._words.set(effect.place, effect.generation)
                case LeaseEnded():
                    self._on_ended(effect)

    def send_blocks(self, *, may_wait: bool) -> None:
        """Sends frames to the waiting sinks in turn, as long as there are buffers.

        `may_wait` for a moment: if only one sink waits.
        """
        self._lacks_buffer = False
        self._may_wait = may_wait and len(self._queued) == 1
        for _ in range(MAX_FRAMES_PER_TURN):
            if not sum(self._send_next(peer) for peer in list(self._queued)):
                return

    def _send_next(self, peer: Peer) -> bool:
        """Sends the next frame that a sink waits for. Returns False if it must wait longer."""
        queue = self._queued[peer]
        read = queue[0]
        num = len(read.indices)
        if self._machine.may_send(read):
            assert self._pool is not None, "a source that cannot reach its pool offers no sending"
            if self._sealed is not None and self._sealed.is_connected(peer):
                if not self._sealed.can_send(peer):
                    return False
                if not self._sealed.send(read, self._pool, may_wait=self._may_wait):
                    return False
            else:
                num = num_records(FRAME_BYTES, read.wire)
                if not self._send_frame(_first(read, num), self._pool):
                    return False
        queue.popleft()
        if len(read.indices) > num:
            queue.appendleft(_without_first(read, num))
        if not queue:
            del self._queued[peer]
        return True

    def wait_for_buffer(self, timeout_s: float) -> None:
        """Waits for a buffer, if `send_blocks` lacked one, so that it can continue."""
        if self._lacks_buffer:
            self._staging.wait(timeout_s)

    def _queue(self, read: SendBlocks) -> None:
        queue = self._queued.setdefault(read.peer, deque())
        if len(queue) >= MAX_QUEUED_READS:
            self._count("dropped_reads")
            log.warning("dropped a read: the sink asks faster than it receives")
            return
        queue.append(read)

    def _send_frame(self, read: SendBlocks, pool: Blocks | DeviceBlocks) -> bool:
        """Sends blocks in one Data over CURVE. Returns False if they must wait."""
        num_bytes = len(read.block_ids) * read.wire.record_bytes
        buffer = self._staging.take(read.peer, num_bytes)
        if buffer is None:
            self._lacks_buffer = True
            return False
        payload = buffer[:num_bytes]
        records = payload.reshape(len(read.block_ids), read.wire.record_bytes)
        checksum = pack(read.wire, pool, read.block_ids, records)
        data = Data(read.lease_id, list(read.indices), checksum)
        tracker = self._send(read.peer, encode(data), payload.data)
        if tracker is not None:
            self._staging.lend(buffer, read.peer, tracker)
        return True

    def _send(self, peer: Peer, header: bytes, payload: Any = None) -> zmq.MessageTracker | None:
        """Sends a message. With a payload, returns the tracker that says when ZeroMQ is done."""
        try:
            self.socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            if payload is None:
                self.socket.send(header, zmq.NOBLOCK)
                return None
            self.socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
            tracker = self.socket.send(payload, zmq.NOBLOCK, copy=False, track=True)
            assert isinstance(tracker, zmq.MessageTracker)
            return tracker
        except zmq.Again:
            self._count("slow_sinks")
            self._send_away(peer, "unread answers")
            return None
        except zmq.ZMQError as error:
            self._count("unsent_messages")  # the sink's or the lease's deadline deals with it
            log.warning("could not send a message to a sink: %s", error)
            return None
        finally:
            self.has_mail = self.has_mail or has_mail(self.socket)


def _host_bytes(num_bytes: int) -> Blocks:
    return np.empty(num_bytes, np.uint8)


def _first(read: SendBlocks, num: int) -> SendBlocks:
    return msgspec.structs.replace(read, indices=read.indices[:num], block_ids=read.block_ids[:num])


def _without_first(read: SendBlocks, num: int) -> SendBlocks:
    return msgspec.structs.replace(read, indices=read.indices[num:], block_ids=read.block_ids[num:])


def drain(socket: "zmq.Socket[bytes]") -> None:
    """Drops the remaining frames of a message, one by one: there may be any number."""
    while socket.get(zmq.RCVMORE):
        socket.recv(copy=False)


def has_mail(socket: "zmq.Socket[bytes]") -> bool:
    """True if a message waits. Its descriptor reports only messages after this call.

    Sending takes note of new messages too. So whoever sent has to ask before it waits.
    """
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def set_heartbeat(socket: "zmq.Socket[bytes]", timing: Timing) -> None:
    """Closes connections to peers that do not answer, and drops their messages."""
    socket.set(zmq.HEARTBEAT_IVL, max(1, int(1000 * timing.hold_every_s)))
    socket.set(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * timing.silence_s)))
