"""The sockets around `BlockNews`, through which a gateway receives one worker's block events.

A feed runs on the gateway's event loop as long as the session with the worker. Each request has its
own socket, so late answers to an earlier request are dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context

import zmq

from engine.clock import Clock
from engine.errors import ProtocolError
from engine.messages import EventsAddress, Welcome
from engine.net.curve import Channel, keep_alive, secure_client
from engine.net.trust import Secret
from engine.worker.block_events import (
    MAX_BATCH_BYTES,
    SNAPSHOT,
    decode_answer,
    decode_batch,
    decode_number,
    encode_number,
    topic_of,
)
from router.block_news import (
    Apply,
    AskBatches,
    AskSnapshot,
    BlockNews,
    Counted,
    EventsMissed,
    Garbled,
    NewsEffect,
    NewsEnded,
    NewsEvent,
    NewsPiece,
    NewsTick,
    Published,
)

log = logging.getLogger(__name__)

MAX_UNREAD_BATCHES = 10_000
MAX_MESSAGES_PER_TURN = 32  # number of messages after which the loop handles other events
SILENCE_S = 2.0  # the connection is replaced if the other host is silent for this long


class BlockFeed:
    """Receives the block events of one worker.

    Calls `on_news` with each batch of events, and `count` with the reason of each request to the
    worker.
    """

    def __init__(
        self,
        info: Welcome,
        address: EventsAddress,
        *,
        secret: Secret,
        clock: Clock,
        on_news: Callable[[Apply | EventsMissed], None],
        count: Callable[[str], None],
    ) -> None:
        self._info = info
        self._address = address
        self._secret = secret
        self._clock = clock
        self._on_news = on_news
        self._count = count
        self._news = BlockNews()
        self._answers: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def is_following(self) -> bool:
        """True if `on_news` has received all batches that the worker is known to have published."""
        return self._news.is_following

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Subscribes and requests a snapshot. Raises ZMQError if a socket cannot connect."""
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._batches = self._connected(zmq.SUB, self._address.published)
        self._batches.set(zmq.SUBSCRIBE, topic_of(self._info.worker_id, self._info.incarnation))
        self._loop.add_reader(self._batches.FD, self._read_batches)
        self._loop.call_soon(self._read_batches)  # connecting may have cleared the signal
        self._perform(self._news.open(self._clock.now_s()))

    def close(self) -> None:
        """Closes the sockets. After this, `on_news` is not called."""
        self._is_closed = True
        self._hang_up()
        self._loop.remove_reader(self._batches.FD)
        self._batches.close(linger=0)
        if self._timer is not None:
            self._timer.cancel()

    def counted(self, num_batches: int) -> None:
        """Records the number of published batches that the worker has reported."""
        self._handle(Counted(num_batches))

    # ------------------------------------------------------------ sockets

    def _connected(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set(zmq.RCVHWM, MAX_UNREAD_BATCHES)
        secure_client(socket, self._secret, Channel.BLOCK_EVENTS, max_message_bytes=MAX_BATCH_BYTES)
        keep_alive(socket, SILENCE_S)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _read_batches(self) -> None:
        """Reads all messages that are there.

        The descriptor signals once when it becomes readable, not once per message.
        """
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._is_closed:
                return
            try:
                frames = self._batches.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(_published(frames))
        self._loop.call_soon(self._read_batches)

    def _read_answers(self, socket: "zmq.Socket[bytes]") -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._answers is not socket:
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(_answered(frames))
        self._loop.call_soon(self._read_answers, socket)

    def _ask(self, wanted: bytes) -> None:
        """Sends a request. If sending fails, no answer comes, and another request follows later."""
        self._hang_up()
        try:
            socket = self._answers = self._connected(zmq.DEALER, self._address.asked)
        except zmq.ZMQError as error:
            log.warning("block events of %s cannot be asked for: %s", self._info.worker_id, error)
            self._count("ask failed")
            return
        self._loop.add_reader(socket.FD, self._read_answers, socket)
        socket.send_multipart((self._info.incarnation.encode(), wanted))
        self._loop.call_soon(self._read_answers, socket)  # sending may have cleared the signal

    def _hang_up(self) -> None:
        if self._answers is not None:
            self._loop.remove_reader(self._answers.FD)
            self._answers.close(linger=0)
            self._answers = None

    # ------------------------------------------------------------ the core

    def _handle(self, event: NewsEvent) -> None:
        if self._is_closed:
            return
        if isinstance(event, NewsEnded):
            self._hang_up()
        self._perform(self._news.handle(event, self._clock.now_s()))

    def _perform(self, effects: Sequence[NewsEffect]) -> None:
        for effect in effects:
            match effect:
                case Apply():
                    self._on_news(effect)
                case AskBatches(first):
                    self._count("batches asked for")
                    self._ask(encode_number(first))
                case AskSnapshot():
                    self._count("snapshot asked for")
                    self._ask(SNAPSHOT)
                case EventsMissed(reason):
                    log.warning("block events of %s: %s", self._info.worker_id, reason)
                    self._count("unheard")
                    self._hang_up()
                    self._on_news(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_s = self._news.next_wake_s()
        if wake_s is not None and not self._is_closed:
            delay_s = max(wake_s - self._clock.now_s(), 0.0)
            self._timer = self._loop.call_later(
                delay_s, self._handle, NewsTick(), context=Context()
            )


def _published(frames: Sequence[bytes]) -> NewsEvent:
    try:
        if len(frames) != 3:
            raise ProtocolError(f"{len(frames)} frames were published")
        return Published(decode_number(frames[1]), decode_batch(frames[2]))
    except ProtocolError as error:
        return Garbled(str(error))


def _answered(frames: Sequence[bytes]) -> NewsEvent:
    """Decodes an answer. Its first frame repeats the request of this socket."""
    try:
        piece = decode_answer(frames[1:])
    except ProtocolError as error:
        return Garbled(str(error))
    return NewsEnded() if piece is None else NewsPiece(*piece)
