"""Publishes a worker's block events, and resends batches that subscribers missed.

The publisher runs on the worker's event loop, beside the sessions of gateways. It does not wait for
subscribers: a slow subscriber loses batches, and notices the gap. An answer is sent a few pieces at
a time, and in between the loop does other work. If the subscriber does not read an answer, the
answer is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from engine.clock import Clock, unix_time_ns
from engine.errors import ProtocolError
from engine.messages import EventsAddress, Incarnation, WorkerId
from engine.net.curve import Channel, Doorkeeper, secure_server
from engine.net.trust import Secret
from engine.worker.block_events import (
    END_NUMBER,
    SNAPSHOT,
    EventLog,
    Numbered,
    decode_number,
    encode_number,
    topic_of,
)
from engine.worker.blocks import CacheEvent

log = logging.getLogger(__name__)

MAX_UNREAD_BATCHES = 10_000  # maximum number of unsent batches for one subscriber
MAX_UNREAD_PIECES = 256  # maximum number of unread pieces of one answer
MAX_ASK_BYTES = 256  # maximum size of a request, and of a subscription
MAX_ANSWERS = 64  # maximum number of answers in progress; more requests are refused
PIECES_PER_TURN = 8  # pieces of one answer that are sent before the loop does other work
ANSWER_TIMEOUT_S = 10.0
FULL_WAIT_S = 0.02  # pause before the next try if a peer's queue is full


@dataclass(slots=True)
class _Answer:
    """The remaining pieces of an answer to one peer.

    `unsent` is a piece that did not fit into the peer's queue.
    """

    peer: bytes
    ask: bytes  # the request frame, returned with each piece
    pieces: Iterator[Numbered]
    due_s: float
    unsent: Sequence[bytes] | None = None


class BlockPublisher:
    """The sockets around an `EventLog`. Every method is called on the event loop."""

    def __init__(  # noqa: PLR0913 - wiring
        self,
        events: EventLog,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        secret: Secret,
        clock: Clock,
        host: str = "127.0.0.1",
        max_unread_batches: int = MAX_UNREAD_BATCHES,
    ) -> None:
        self._log = events
        self._topic = topic_of(worker_id, incarnation)
        self._incarnation = incarnation.encode()
        self._secret = secret
        self._clock = clock
        self._doorkeeper = Doorkeeper(secret, Channel.BLOCK_EVENTS, clock)
        self._host = host
        self._max_unread_batches = max_unread_batches
        self._answers: deque[_Answer] = deque()
        self._is_closed = False

    @property
    def num_batches(self) -> int:
        """The number of batches published so far. Any thread may read this."""
        return self._log.num_batches

    def open(self) -> EventsAddress:
        """Binds the sockets for events and for queries."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeeper.open(self._context)
        self._published = self._context.socket(zmq.PUB)
        self._published.set(zmq.SNDHWM, self._max_unread_batches)
        self._asked = self._context.socket(zmq.ROUTER)
        # If a peer's queue is full, sending raises zmq.Again and loses no frame.
        self._asked.set(zmq.ROUTER_MANDATORY, 1)
        self._asked.set(zmq.SNDHWM, MAX_UNREAD_PIECES)
        for socket in (self._published, self._asked):
            secure_server(
                socket, self._secret, Channel.BLOCK_EVENTS, max_message_bytes=MAX_ASK_BYTES
            )
        ports = [
            socket.bind_to_random_port(f"tcp://{self._host}")
            for socket in (self._published, self._asked)
        ]
        self._loop.add_reader(self._asked.FD, self._receive_requests)
        # `bind` may have consumed the descriptor's event.
        self._loop.call_soon(self._receive_requests)
        address = EventsAddress(*(f"tcp://{self._host}:{port}" for port in ports))
        log.info("block events: %s under %s", address, self._topic.decode())
        return address

    def close(self) -> None:
        """Closes the sockets. Unsent frames are dropped."""
        self._is_closed = True
        self._loop.remove_reader(self._asked.FD)
        self._answers.clear()
        self._context.destroy(linger=0)

    @property
    def counters(self) -> dict[str, float]:
        """Returns the number of refused connections. Any thread may call this."""
        return dict(self._doorkeeper.counters)

    def publish(self, news: Sequence[CacheEvent]) -> None:
        """Publishes block events to all subscribers whose queues have room."""
        if self._is_closed:
            return
        for number, batch in self._log.append(news, unix_time_ns() / 1e9):
            self._published.send_multipart((self._topic, encode_number(number), batch))

    # ------------------------------------------------------------ answers

    def _receive_requests(self) -> None:
        """Reads all waiting requests, because the descriptor signals each event only once."""
        if self._is_closed:
            return
        is_idle = not self._answers
        while True:
            try:
                frames = self._asked.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._accept(frames)
            except ProtocolError as error:
                log.warning("a request for block events was refused: %s", error)
        if is_idle and self._answers:
            self._send_answers()

    def _accept(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3:
            raise ProtocolError(f"a request of {len(frames)} frames")
        peer, ask, wanted = frames
        if ask and not ask.startswith(self._incarnation):
            raise ProtocolError("the request is for an earlier incarnation of this worker")
        if len(self._answers) >= MAX_ANSWERS:
            raise ProtocolError("too many answers are in progress")
        if wanted == SNAPSHOT:
            pieces = self._log.snapshot(unix_time_ns() / 1e9)
        else:
            pieces = iter(self._log.since(decode_number(wanted)))
        self._answers.append(_Answer(peer, ask, pieces, self._clock.now_s() + ANSWER_TIMEOUT_S))

    def _send_answers(self) -> None:
        """Sends some pieces of the oldest answer, and schedules the next call."""
        if self._is_closed or not self._answers:
            return
        answer = self._answers.popleft()
        wait_s = 0.0
        try:
            if not self._send_some(answer):
                self._answers.append(answer)
        except zmq.Again:
            wait_s = FULL_WAIT_S
            if self._clock.now_s() < answer.due_s:
                self._answers.append(answer)
            else:
                log.warning("a subscriber does not read the block events that it asked for")
        except zmq.ZMQError as error:
            log.info("a subscriber that asked for block events is gone: %s", error)
        # `send` may have consumed the descriptor's event.
        self._loop.call_soon(self._receive_requests)
        if self._answers:
            self._loop.call_later(wait_s, self._send_answers)

    def _send_some(self, answer: _Answer) -> bool:
        """Sends some pieces of an answer.

        Returns true after its last piece. Raises zmq.Again if the peer's queue is full.
        """
        for _ in range(PIECES_PER_TURN):
            if answer.unsent is None:
                number, batch = next(answer.pieces, (END_NUMBER, b""))
                answer.unsent = (answer.peer, answer.ask, encode_number(number), batch)
            self._asked.send_multipart(answer.unsent, zmq.NOBLOCK)
            is_end = answer.unsent[3] == b""
            answer.unsent = None
            if is_end:
                return True
        return False
