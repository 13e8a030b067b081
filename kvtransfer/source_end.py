"""The source's side of an endpoint: a ROUTER socket to which sinks connect."""

import logging
from collections.abc import Callable, Collection
from typing import Any

import zmq

from engine.errors import ProtocolError
from engine.net.curve import Channel, keep_alive, secure_server
from engine.worker.events import LeaseEnded
from kvtransfer.lease.effects import Peer, SendBlocks, SendToSink, SetWord, SourceEffect
from kvtransfer.lease.source import SourceMachine
from kvtransfer.lease_words import LeaseWords
from kvtransfer.messages import (
    AskSealed,
    LeaseMessage,
    MaySeal,
    decode_to_source,
    encode,
)
from kvtransfer.native.stream import agreed_lanes
from kvtransfer.transports.seam import TransferContext
from kvtransfer.transports.zmq import ZmqTransport

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**16  # largest message of a sink; sinks send no payload
MAX_UNREAD_MESSAGES = 1024  # most messages queued for one sink; a sink with more is disconnected
MAX_MESSAGES_PER_TURN = 64  # messages handled before sources and deadlines are served


class SourceEnd:
    """Performs the effects of the source machine. Owned by the transfer thread."""

    def __init__(
        self,
        context: TransferContext,
        machine: SourceMachine,
        transport: ZmqTransport,
        *,
        words: LeaseWords | None,
        before: Callable[[], None],
        on_ended: Callable[[LeaseEnded], None],
    ) -> None:
        """`transport` sends blocks to sinks that cannot read the pool's memory.

        `before` is called before each message is handled. It carries out waiting orders, so the
        order that opens a lease precedes the messages about the lease.
        """
        self._context = context
        self._count = context.count
        self._machine = machine
        self._transport = transport
        self._sealed = transport.sealed_source
        self._words = words
        self._before = before
        self._on_ended = on_ended
        self.has_mail = False  # True if messages may be waiting that no descriptor reports

    def open(self, host: str) -> str:
        """Binds the socket; returns the address for sinks."""
        context = self._context
        self.socket = context.sockets.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # makes sending to a lost peer an error
        self.socket.set(zmq.ROUTER_HANDOVER, 1)  # lets a sink that reconnects keep its routing id
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        secure_server(self.socket, context.secret, Channel.KV, max_message_bytes=MAX_MESSAGE_BYTES)
        keep_alive(self.socket, context.timing.silence_s)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        return f"tcp://{host}:{port}"

    def close(self) -> None:
        """Closes the socket and the streams. Unsent messages are dropped."""
        if self._words is not None:
            self._words.close()
        self._transport.stop()
        self.socket.close(linger=0)

    def receive(self, ready: Collection[int]) -> None:
        """Handles a limited number of messages. Disconnects sinks that send an invalid message.

        `ready` are the descriptors that can be read or written.
        """
        for peer, read in self._sealed.receive(ready):
            if isinstance(read, ProtocolError):
                self._refuse(peer, read)
            else:
                self._handle(peer, read)
        self.has_mail = False
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not has_mail(self.socket):
                return
            peer = self.socket.recv(zmq.NOBLOCK)
            try:
                frame = self.socket.recv() if self.socket.get(zmq.RCVMORE) else b""
                if self.socket.get(zmq.RCVMORE):
                    drain(self.socket)
                    raise ProtocolError("a sink's message must have one frame")
                message = decode_to_source(frame)
            except ProtocolError as error:
                self._refuse(peer, error)
                continue
            if isinstance(message, AskSealed):
                self._admit(peer, message)
            else:
                self._handle(peer, message)
        self.has_mail = True  # more messages may be waiting

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        self._count("bad_messages", 1)
        log.warning("cut off a sink: %s", error)
        self._send_away(peer, "bad message")

    def _send_away(self, peer: Peer, reason: str) -> None:
        self._sealed.dismiss(peer)
        self.perform(self._machine.send_away(peer, reason))

    def _admit(self, peer: Peer, ask: AskSealed) -> None:
        if self._sealed.port is not None and self._machine.is_attached(peer):
            self._sealed.admit(peer, ask)
            self._send(peer, encode(MaySeal(agreed_lanes(ask.lanes))))

    def _handle(self, peer: Peer, message: LeaseMessage) -> None:
        self._before()
        self.perform(self._machine.receive(peer, message, self._context.clock.now_s()))

    def perform(self, effects: list[SourceEffect]) -> None:
        """Performs effects, except that blocks are only queued for `send_blocks`."""
        for effect in effects:
            match effect:
                case SendToSink():
                    self._send(effect.peer, encode(effect.message))
                case SendBlocks():
                    self._transport.queue(effect)
                case SetWord():
                    assert self._words is not None, "words are used if they were offered"
                    self._words.set(effect.place, effect.generation)
                case LeaseEnded():
                    self._on_ended(effect)

    def send_blocks(self, *, may_wait: bool) -> None:
        """Sends the blocks for which sinks wait, as long as staging buffers are free."""
        self._transport.flush(self._machine.may_send, self._send, may_wait=may_wait)

    def _send(self, peer: Peer, header: bytes, payload: Any = None) -> zmq.MessageTracker | None:
        """Sends a message to a sink. With a payload, returns the tracker of ZeroMQ's use of the
        payload.
        """
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
            self._count("slow_sinks", 1)
            self._send_away(peer, "unread answers")
            return None
        except zmq.ZMQError as error:
            # the lease then ends by its deadline, or the sink by the silence of the source
            self._count("unsent_messages", 1)
            log.warning("could not send a message to a sink: %s", error)
            return None
        finally:
            self.has_mail = self.has_mail or has_mail(self.socket)


def drain(socket: "zmq.Socket[bytes]") -> None:
    """Drops the remaining frames of a message one by one, since their number has no limit."""
    while socket.get(zmq.RCVMORE):
        socket.recv(copy=False)


def has_mail(socket: "zmq.Socket[bytes]") -> bool:
    """Returns True if a message is waiting. The descriptor reports only messages after this call.

    Sending also reads new messages from the network. So call this after sending and before waiting.
    """
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
