"""Limits on a listener's clients: connections, bytes, time, and the parser's work.

No socket, no clock. `Book` has the limits and counts of a listener: it admits connections and
counts refusals. `ConnectionTimes` decides when a connection is overdue. A listener checks once a
second, so no connection needs timers.

A request's head is its request line and header fields. The head's clock starts with the connection,
or with the first byte after the previous request. The body's clock starts when the head is
complete.

`Feeder` shares the parsing of HTTP among the connections of a listener. A body may come in chunks
of one byte. Then the parser calls Python once per six bytes, and a buffer of 256 KiB takes 0.2 s in
one piece. So input is parsed in slices. When the work of an iteration of the loop is used up, the
rest waits for the next one, which feeds one connection after the other. A connection with waiting
input is not read. Usual requests and long bodies never wait.
"""

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

log = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_PIPELINED = 8  # requests of a connection that may wait for an earlier answer
FREE_PARTS = 4096  # parts of a body that are free of the size rule, as chunks or network reads
MIN_PART_BYTES = 32  # minimum mean size of the parts after the first `FREE_PARTS`
BODY_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 60.0  # after this, a client that reads nothing is cut off
LINGER_S = 2.0  # input is discarded for this long after a last answer
IDLE_TIMEOUT_S = 5.0  # allowed after an answer until the next request
SLICE_BYTES = 2048
WORK_PER_ITERATION = 4000  # units; 2 to 4 ms
PART_WORK, FIELD_WORK = 4, 1  # work per callback: part of a body, header field


class Overdue(StrEnum):
    """The reason for which an overdue connection is closed."""

    SILENT = "no request came"
    HEAD = "the head of a request took too long"
    BODY = "the body of a request took too long"
    STALLED = "the client took nothing of its answer"
    LINGER = "the last answer was sent"
    IDLE = "no further request came"


@dataclass(slots=True)
class Book:
    """The limits of one listener that are settings, and its counts."""

    max_head_bytes: int = 32 * 2**10  # also applies to trailers, which come between parts of a body
    max_bodies_bytes: int = 256 * 2**20  # total of all incomplete bodies
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    head_timeout_s: float = 10.0  # also for a TLS handshake
    num_connections: int = 0
    bodies_bytes: int = 0  # total of incomplete bodies
    refusals: Counter[str] = field(default_factory=Counter)  # connections and requests
    tls_events: Counter[str] = field(default_factory=Counter)  # reloads of certificates, by outcome
    _of_address: Counter[str] = field(default_factory=Counter)

    @property
    def sweep_every_s(self) -> float:
        """Seconds between two checks for overdue connections."""
        return min(self.head_timeout_s, LINGER_S) / 4

    def admit(self, address: str) -> str | None:
        """Counts a connection, or returns the reason for refusing it."""
        if self.num_connections >= self.max_connections:
            return self.refuse("too many connections")
        if self._of_address[address] >= self.max_connections_per_address:
            return self.refuse("too many connections of one address")
        self.num_connections += 1
        self._of_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Removes an admitted connection that has ended."""
        self.num_connections -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    def refuse(self, reason: str) -> str:
        """Counts a refusal and returns its reason."""
        self.refusals[reason] += 1
        return reason

    def validate(self) -> None:
        """Raises AssertionError if the counts do not agree."""
        assert self.num_connections == sum(self._of_address.values())
        assert all(number > 0 for number in self._of_address.values())
        assert self.bodies_bytes >= 0


@dataclass(slots=True)
class ConnectionTimes:
    """The times since when one connection owes a head, a body or progress; None: not owed."""

    head_s: float | None  # since when the head of a request is owed
    body_s: float | None = None  # since when the rest of a body is owed
    last_s: float | None = None  # time at which the last answer was sent
    idle_s: float | None = None  # time at which an answer was sent, if no further request has come
    has_begun: bool = False  # a byte of the head has arrived
    num_unsent: int = 0  # bytes of answers that were unsent at the last check
    stall_s: float | None = None  # time since which `num_unsent` has not fallen

    def overdue(
        self, now_s: float, head_timeout_s: float, *, num_unsent: int, is_answered: bool
    ) -> Overdue | None:
        """Returns the reason to close the connection now, or None.

        While an earlier answer runs, the next request may wait.
        """
        if not num_unsent or num_unsent < self.num_unsent or self.stall_s is None:
            self.stall_s = now_s if num_unsent else None
        self.num_unsent = num_unsent
        if self.stall_s is not None and now_s - self.stall_s >= STALL_TIMEOUT_S:
            return Overdue.STALLED
        if self.last_s is not None:
            return Overdue.LINGER if now_s - self.last_s >= LINGER_S else None
        if self.idle_s is not None and now_s - self.idle_s >= IDLE_TIMEOUT_S:
            return Overdue.IDLE
        if is_answered:
            return None
        if self.head_s is not None and now_s - self.head_s >= head_timeout_s:
            return Overdue.HEAD if self.has_begun else Overdue.SILENT
        if self.body_s is not None and now_s - self.body_s >= BODY_TIMEOUT_S:
            return Overdue.BODY
        return None


class FedConnection(Protocol):
    """A connection whose input is fed by a `Feeder`."""

    def parse(self, data: bytes | memoryview) -> bool:
        """Parses a slice. Returns False if the rest must be discarded."""
        ...

    def hold(self) -> None:
        """Stops reading."""
        ...

    def let_go(self) -> None:
        """Resumes reading, unless there are other reasons to pause."""
        ...

    def cut(self) -> None:
        """Closes the connection at once."""
        ...


class Feeder:
    """Feeds input to the connections of one listener."""

    def __init__(self) -> None:
        self.work_left = WORK_PER_ITERATION  # the parser's callbacks reduce it
        self._is_scheduled = False  # True while waiting input is to be parsed
        self._waiting: dict[FedConnection, deque[memoryview]] = {}  # waiting input, next first

    def feed(self, connection: FedConnection, data: bytes) -> None:
        """Feeds input to a connection, at once or in later iterations of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._feed_waiting)
        if (inputs := self._waiting.get(connection)) is not None:
            inputs.append(memoryview(data))
            connection.hold()  # it had resumed reading for another reason
        elif len(data) <= SLICE_BYTES and self.work_left > 0:
            connection.parse(data)
        else:
            rest = memoryview(data)
            while rest and self.work_left > 0:
                if not connection.parse(rest[:SLICE_BYTES]):
                    return
                rest = rest[SLICE_BYTES:]
            if rest:
                self._waiting[connection] = deque((rest,))
                connection.hold()

    def remove(self, connection: FedConnection) -> None:
        """Discards the waiting input of a connection."""
        if self._waiting.pop(connection, None) is not None:
            connection.let_go()

    def _feed_waiting(self) -> None:
        self.work_left = WORK_PER_ITERATION
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._feed_waiting)
        while self._waiting and self.work_left > 0:
            connection = next(iter(self._waiting))
            inputs = self._waiting[connection]
            data = inputs.popleft()
            try:
                goes_on = connection.parse(data[:SLICE_BYTES])
            except Exception:  # other connections must not be affected
                log.exception("parsing the input of a connection failed: it is cut")
                connection.cut()
                goes_on = False
            if not goes_on:
                self.remove(connection)
                continue
            if len(data) > SLICE_BYTES:
                inputs.appendleft(data[SLICE_BYTES:])
            if not inputs:
                self.remove(connection)
            elif self._waiting.pop(connection, None) is not None:  # it is still open
                self._waiting[connection] = inputs
