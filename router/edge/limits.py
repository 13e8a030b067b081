"""Limits on a listener's clients: connections, bytes, time, and the parser's work.

No socket, no clock. `Book` has the limits and counts of a listener: it admits connections and
counts refusals. `ConnectionTimes` decides when a connection is overdue. A listener checks once a
second, so no connection needs timers.

A request's head is its request line and header fields. The time for the head starts with the
connection, or with the first byte after the previous request. The time for the body starts when the
head is complete.

`Feeder` shares the parsing of HTTP among the connections of a listener. A body may come in chunks
of one byte. Then the parser calls Python once per six bytes, and a buffer of 256 KiB takes 0.2 s.
So input is parsed in slices. When the work of an iteration of the loop is used up, the remaining
input waits for the next iteration, which feeds one connection after the other. A connection with
waiting input is not read. The input of usual requests and long bodies never waits.
"""

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

log = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_PIPELINED = 8  # maximum number of a connection's requests that wait for an earlier answer
FREE_PARTS = 4096  # number of parts of a body (chunks or network reads) that may be of any size
MIN_PART_BYTES = 32  # minimum mean size of the parts after the first `FREE_PARTS`
BODY_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 60.0  # after this time, a client that reads nothing is disconnected
LINGER_S = 2.0  # time for which input is discarded after a last answer
IDLE_TIMEOUT_S = 5.0  # maximum time from an answer to the next request
SLICE_BYTES = 2048
WORK_PER_ITERATION = 4000  # units of work, together 2 to 4 ms
PART_WORK, FIELD_WORK = 4, 1  # units per callback for a part of a body, and for a header field


class Overdue(StrEnum):
    """The reason for closing an overdue connection."""

    SILENT = "no request came"
    HEAD = "the head of a request took too long"
    BODY = "the body of a request took too long"
    STALLED = "the client took nothing of its answer"
    LINGER = "the last answer was sent"
    IDLE = "no further request came"


@dataclass(slots=True)
class Book:
    """The configurable limits of one listener, and its counts."""

    max_head_bytes: int = 32 * 2**10  # maximum of a head, and of trailers after a body
    max_bodies_bytes: int = 256 * 2**20  # total of all incomplete bodies
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    head_timeout_s: float = 10.0  # maximum for a head, and for a TLS handshake
    num_connections: int = 0
    bodies_bytes: int = 0  # total of incomplete bodies
    refusals: Counter[str] = field(default_factory=Counter)  # numbers of refusals, by reason
    tls_events: Counter[str] = field(default_factory=Counter)  # reloads of certificates, by outcome
    _of_address: Counter[str] = field(default_factory=Counter)

    @property
    def sweep_every_s(self) -> float:
        """Seconds between two checks for overdue connections."""
        return min(self.head_timeout_s, LINGER_S) / 4

    def admit(self, address: str) -> str | None:
        """Admits and counts a connection, or returns the reason for its refusal."""
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
        """Counts a refusal, and returns its reason."""
        self.refusals[reason] += 1
        return reason

    def validate(self) -> None:
        """Asserts that the counts are consistent."""
        assert self.num_connections == sum(self._of_address.values())
        assert all(number > 0 for number in self._of_address.values())
        assert self.bodies_bytes >= 0


@dataclass(slots=True)
class ConnectionTimes:
    """The start of each timeout that runs for one connection; None if that timeout does not run."""

    head_s: float | None  # start of the wait for the head of a request
    body_s: float | None = None  # start of the wait for the rest of a body
    last_s: float | None = None  # time at which the last answer was sent
    idle_s: float | None = None  # time of the last answer, while no further request has come
    has_begun: bool = False  # a byte of the head has arrived
    num_unsent: int = 0  # bytes of answers that were unsent at the last check
    stall_s: float | None = None  # time since which `num_unsent` has not decreased

    def overdue(
        self, now_s: float, head_timeout_s: float, *, num_unsent: int, is_answered: bool
    ) -> Overdue | None:
        """Returns the reason to close the connection now, or None.

        While an earlier answer runs, no timeout of the next request runs.
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
        """Parses a slice. Returns False if the remaining input must be discarded."""
        ...

    def hold(self) -> None:
        """Stops reading from the client."""
        ...

    def let_go(self) -> None:
        """Resumes reading from the client, unless there are other reasons to pause."""
        ...

    def cut(self) -> None:
        """Closes the connection at once."""
        ...


class Feeder:
    """Passes input to the parsers of one listener's connections, within a budget of work."""

    def __init__(self) -> None:
        self.work_left = WORK_PER_ITERATION  # units; the parser's callbacks subtract their work
        self._is_scheduled = False  # True if waiting input will be parsed in the next iteration
        self._waiting: dict[FedConnection, deque[memoryview]] = {}  # in the order of parsing

    def feed(self, connection: FedConnection, data: bytes) -> None:
        """Parses the input of a connection, at once or in later iterations of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._feed_waiting)
        if (inputs := self._waiting.get(connection)) is not None:
            inputs.append(memoryview(data))
            connection.hold()  # reading may have been resumed for another reason
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
            except Exception:  # an error of one connection must not affect others
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
            elif self._waiting.pop(connection, None) is not None:  # the connection is still open
                self._waiting[connection] = inputs
