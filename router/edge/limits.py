"""Limits on a listener's clients: connections, bytes and time.

Pure: no socket, no clock. `Book` admits connections and counts refusals. `ConnectionPace` decides
when a connection is overdue. A listener checks once a second, so no connection needs timers.

A request's head is its request line and header fields. The head's clock starts with the connection,
or with the first byte after the previous request. The body's clock starts when the head is
complete.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """The limits of one listener."""

    max_head_bytes: int = 32 * 2**10  # also applies to trailers, which come between parts of a body
    max_headers: int = 100
    max_pipelined: int = 8  # requests of a connection that may wait for an earlier answer
    max_bodies_bytes: int = 256 * 2**20  # total of all incomplete bodies
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    head_timeout_s: float = 10.0  # also for a TLS handshake
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0  # after this, a client that reads nothing is cut off
    linger_s: float = 2.0  # input is discarded for this long after a last answer
    idle_timeout_s: float = 5.0  # allowed after an answer until the next request

    @property
    def sweep_every_s(self) -> float:
        """Seconds between two checks for overdue connections."""
        timeouts = (self.head_timeout_s, self.body_timeout_s, self.stall_timeout_s, self.linger_s)
        return min(1.0, min(timeouts) / 4)


class Overdue(StrEnum):
    """The reason for which an overdue connection is closed."""

    SILENT = "no request came"
    HEAD = "the head of a request took too long"
    BODY = "the body of a request took too long"
    STALLED = "the client took nothing of its answer"
    LINGER = "the last answer was sent"
    IDLE = "no further request came"


class Book:
    """The counts of one listener, within its limits."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.limits = limits
        self.num_connections = 0
        self.bodies_bytes = 0  # total of incomplete bodies
        self.refusals: Counter[str] = Counter()  # refused connections and requests, by reason
        self.tls_events: Counter[str] = Counter()  # reloads of certificates, by outcome
        self._of_address: Counter[str] = Counter()

    def admit(self, address: str) -> str | None:
        """Counts a connection, or returns the reason for refusing it."""
        if self.num_connections >= self.limits.max_connections:
            return self.refuse("too many connections")
        if self._of_address[address] >= self.limits.max_connections_per_address:
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
class ConnectionPace:
    """The times since when one connection owes a head, a body or progress; None: not owed."""

    head_s: float | None  # since when the head of a request is owed
    body_s: float | None = None  # since when the rest of a body is owed
    last_s: float | None = None  # time at which the last answer was sent
    idle_s: float | None = None  # time at which an answer was sent, if no further request has come
    has_begun: bool = False  # a byte of the head has arrived
    num_unsent: int = 0  # bytes of answers that were unsent at the last check
    stall_s: float | None = None  # time since which `num_unsent` has not fallen

    def await_head(self, now_s: float) -> None:
        """Starts the clock of the next head."""
        self.head_s, self.body_s, self.has_begun = now_s, None, False

    def begin_body(self, now_s: float) -> None:
        """Records a complete head and starts the clock of the body."""
        self.head_s, self.body_s = None, now_s

    def end_message(self) -> None:
        """Records a complete request. Nothing is owed until the next request's first byte."""
        self.head_s = self.body_s = None

    def resume(self, now_s: float) -> None:
        """Restarts the clocks after an answer, as the next request had to wait for it."""
        if self.head_s is not None:
            self.head_s = now_s
        if self.body_s is not None:
            self.body_s = now_s

    def overdue(
        self, now_s: float, limits: EdgeLimits, *, num_unsent: int, is_answered: bool
    ) -> Overdue | None:
        """Returns the reason to close the connection now, or None.

        While an earlier answer runs, the next request may wait.
        """
        if self._has_stalled(now_s, limits.stall_timeout_s, num_unsent):
            return Overdue.STALLED
        if self.last_s is not None:
            return Overdue.LINGER if now_s - self.last_s >= limits.linger_s else None
        if self.idle_s is not None and now_s - self.idle_s >= limits.idle_timeout_s:
            return Overdue.IDLE
        if is_answered:
            return None
        if self.head_s is not None and now_s - self.head_s >= limits.head_timeout_s:
            return Overdue.HEAD if self.has_begun else Overdue.SILENT
        if self.body_s is not None and now_s - self.body_s >= limits.body_timeout_s:
            return Overdue.BODY
        return None

    def _has_stalled(self, now_s: float, timeout_s: float, num_unsent: int) -> bool:
        if not num_unsent or num_unsent < self.num_unsent or self.stall_s is None:
            self.stall_s = now_s if num_unsent else None
        self.num_unsent = num_unsent
        return self.stall_s is not None and now_s - self.stall_s >= timeout_s
