"""One HTTP connection of the server: uvicorn's, with limits and two extensions of ASGI.

uvicorn does all of HTTP: parsing, heads, keep-alive, pipelining, shutdown. This module adds the
limits of `router.edge.limits`, and the pipe and the caller of `router.edge.extension`, which an
application finds in `scope["extensions"]`.

With the *pipe* an application writes parts of a body straight to the transport. `send` is a
coroutine, so it would need to wake a task for each token of each stream, for one call of
`transport.write`. Measured with 64 streams, that task costs more than everything else that is done
for a token, including the system call. Parts are sent at the end of the loop's turn: see `_Outbox`.

The pipe may be used between `http.response.start`, with a head without a length, and the last
`http.response.body`. uvicorn starts the next request of a connection only after that.

With the *caller* an application takes a body that has come already, without waiting. It also gets a
callback when the client leaves. With `receive` alone, a task would have to wait for that.

The head of a response is sent in one piece with what follows in the same turn.

uvicorn has no limit on heads. A connection that breaks our limits is refused, with an answer if no
other answer has begun. If the body of a request is incomplete, its response is the connection's
last. Input after it is discarded for a moment, so that the client can read the response.
"""

import asyncio
import logging
from typing import Any
from weakref import WeakKeyDictionary

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from router.edge.extension import EXTENSION, NO_SOCKET, Caller
from router.edge.feeding import FIELD_WORK, PART_WORK, Feeder
from router.edge.limits import Book, ConnectionPace, EdgeLimits, Overdue
from router.edge.refusals import (
    LONG_HEAD,
    NO_ROOM,
    NOT_HTTP,
    SLOW_BODY,
    SLOW_HEAD,
    SMALL_PARTS,
    TOO_MANY,
    TWICE,
    EdgeRefusal,
)

log = logging.getLogger(__name__)


FREE_PARTS = 4096  # parts of a body, as chunks or as the network delivers it
MIN_PART_BYTES = 32  # mean size of the parts beyond `FREE_PARTS`
_ONCE = frozenset({b"host", b"authorization"})  # of two, a proxy might read the other one


class _NotParsed(Exception):
    """Raised inside a callback of the parser, which swallows it."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection as a `BodyPipe`. Each part is one chunk of HTTP/1.1's chunked coding."""

    is_ready = False

    def __init__(self, *args: Any, book: Book | None = None, **options: Any) -> None:
        """`book` is the listener's. Without it, the connection has limits of its own."""
        super().__init__(*args, **options)
        self._book = book or Book(EdgeLimits())
        self._limits = self._book.limits
        self._address = ""  # the address that it is counted under
        self._is_counted = False
        self._is_last = False  # further input is discarded
        self._is_draining = False
        self._num_fed = 0  # bytes since the parser last completed a part or a piece of a body
        self._num_body = 0  # bytes of an incomplete body
        self._has_head = False  # the present request's head is complete
        self._num_parts = self._num_parts_bytes = 0  # of its body
        self._refusal: EdgeRefusal | None = None  # set by a callback of the parser

    def data_received(self, data: bytes) -> None:
        """Parses input, unless the last answer was sent."""
        if self._is_last:
            return
        self._unset_keepalive_if_required()
        self._feeder.take(self, data)

    def parse(self, data: bytes | memoryview) -> bool:
        """Parses a slice of input; implements `FedConnection`."""
        pace = self._pace
        if pace.head_s is None and pace.body_s is None:
            pace.await_head(self.loop.time())
        pace.has_begun = True
        self._num_fed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no other protocol is offered
            self.cycle.keep_alive = False
            self._is_last = True
        except httptools.HttpParserError:
            self._refuse(self._refusal or NOT_HTTP)
        else:
            if self._num_fed > self._limits.max_head_bytes:
                self._refuse(LONG_HEAD)
        return not self._is_last and not self.transport.is_closing()

    def hold(self) -> None:
        """Stops reading until the input is parsed; implements `FedConnection`."""
        self.transport.pause_reading()

    def let_go(self) -> None:
        """Reads again unless uvicorn does not want to; implements `FedConnection`."""
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        """Begins a head."""
        self._has_head = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a field of the head. Drops trailers, which uvicorn would add to the head."""
        self._feeder.spend(FIELD_WORK)
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begins a request; its task has not run yet."""
        limits = self._limits
        if len(self.headers) > limits.max_headers or (
            self._num_fed > limits.max_head_bytes and self._head_bytes() > limits.max_head_bytes
        ):
            self._raise(LONG_HEAD)
        if len(self.pipeline) >= limits.max_pipelined:
            self._raise(TOO_MANY)
        if not self.url.isascii():
            self._raise(NOT_HTTP)
        if _has_twice(self.headers):
            self._raise(TWICE)
        self._has_head = True
        self._num_fed = self._num_parts = self._num_parts_bytes = 0
        self._pace.begin_body(self.loop.time())
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            if self._is_draining:
                cycle.keep_alive = False
            cycle.transport = _LastOrNot(self, cycle)  # type: ignore[assignment]
            caller = Caller(cycle)
            self._callers.append(caller)
            offered: dict[object, object] = {"pipe": self, "caller": caller}
            if self.scope["http_version"] != "1.1":  # clients of HTTP/1.0 know no chunks
                del offered["pipe"]
                cycle.chunked_encoding = False
                cycle.expected_content_length = _UntilClosed()
            self.scope["extensions"] = {EXTENSION: offered}

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        book = self._book
        self._num_fed = 0
        self._feeder.spend(PART_WORK)
        self._num_parts += 1
        self._num_parts_bytes += len(body)
        if self._num_parts > FREE_PARTS + self._num_parts_bytes // MIN_PART_BYTES:
            self._raise(SMALL_PARTS)
        if self._callers and self._callers[-1].streams_body:
            self._remove_body()  # the application has it, but for what uvicorn buffers
            self._pace.begin_body(self.loop.time())
            super().on_body(body)
            return
        self._num_body += len(body)
        book.bodies_bytes += len(body)
        if book.bodies_bytes > self._limits.max_bodies_bytes:
            self._raise(NO_ROOM)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Notes a complete request. From now on its body counts as the application's."""
        self._remove_body()
        self._num_fed = 0
        self._pace.end_message()
        super().on_message_complete()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admits the connection of a client, or refuses it."""
        super().connection_made(transport)
        self._outbox = _outboxes.setdefault(self.loop, _Outbox())
        self._feeder = _feeders.setdefault(self.loop, Feeder())
        self._callers: list[Caller] = []  # of requests that are not answered yet
        self._descriptor = _descriptor_of(transport)
        self._pace = ConnectionPace(self.loop.time())
        self.is_ready = True
        if self._is_counted:
            return
        self._address = self.client[0] if self.client else ""
        reason = self._book.admit(self._address)
        if reason is None:
            self._is_counted = True
        else:
            log.warning("a connection from %s was refused: %s", self._address, reason)
            self._is_last = True
            refusal = EdgeRefusal(503, "Service Unavailable", "overloaded", reason)
            transport.write(refusal.response())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes that the client has left."""
        self.is_ready = False
        self._feeder.remove(self)
        self._remove_body()
        self.uncount()
        super().connection_lost(exc)
        self._leave_callers()

    def count_under(self, address: str) -> None:
        """Notes the address of a connection that was admitted when it was accepted."""
        self._address, self._is_counted = address, True

    def uncount(self) -> None:
        """Ends the count of this connection."""
        if self._is_counted:
            self._is_counted = False
            self._book.leave(self._address)

    def on_response_complete(self) -> None:
        """Notes that the oldest request is answered."""
        if self._callers:
            # The cycle refers to itself by these two. Without them all of it is freed now.
            cycle = self._callers.pop(0).cycle
            del cycle.scope["extensions"]
            cycle.transport = self.transport
        self._pace.resume(self.loop.time())
        super().on_response_complete()

    def check(self, now_s: float) -> None:
        """Closes the connection if it is overdue."""
        cycle, num_callers = self.cycle, len(self._callers)
        why = self._pace.overdue(
            now_s,
            self._limits,
            num_unsent=self.transport.get_write_buffer_size(),
            is_answered=num_callers > 1
            or (num_callers == 1 and (cycle.response_started or not cycle.more_body)),
        )
        if why is None:
            return
        if why is Overdue.LINGER:
            self.transport.close()
            self._pace.last_s = None  # what is unsent may still stall
        elif why is Overdue.STALLED:
            log.warning("a connection from %s is cut: %s", self._address, self._book.refuse(why))
            self.transport.abort()
        elif why is Overdue.SILENT:
            self._book.refuse(why)
            self.transport.close()
        else:
            self._refuse(SLOW_HEAD if why is Overdue.HEAD else SLOW_BODY)

    def shutdown(self) -> None:
        """Takes no requests after those that have begun to arrive."""
        self._is_draining = True
        if self._callers or not (self._pace.head_s is not None and self._pace.has_begun):
            super().shutdown()

    def cut(self) -> None:
        """Ends the connection at once."""
        self.transport.abort()

    def finish(self) -> None:
        """Notes that the connection's last response is sent."""
        if self.transport.is_closing():
            return
        self._is_last = True
        self._feeder.remove(self)
        self._remove_body()
        self._pace.last_s = self.loop.time()
        self.flow.resume_reading()

    def _head_bytes(self) -> int:
        fields = sum(len(name) + len(value) + 4 for name, value in self.headers)
        return len(self.url) + fields

    def _raise(self, refusal: EdgeRefusal) -> None:
        """Stops the parser and remembers the refusal."""
        self._refusal = refusal
        raise _NotParsed

    def _refuse(self, refusal: EdgeRefusal) -> None:
        self._book.refuse(refusal.message)
        log.warning("a connection from %s is ended: %s", self._address, refusal.message)
        cycle = self.cycle
        if len(self._callers) > 1 or (self._callers and cycle.response_started):
            self.transport.close()  # an answer has begun, so no other one can be sent
            return
        self._answer_last(refusal)
        self._leave_callers()

    def _answer_last(self, refusal: EdgeRefusal) -> None:
        if not self.transport.is_closing():
            self.transport.write(refusal.response())
        self.finish()

    def _leave_callers(self) -> None:
        for caller in self._callers:
            caller.leave()
        self._callers.clear()
        self.pipeline.clear()

    def _remove_body(self) -> None:
        self._book.bodies_bytes -= self._num_body
        self._num_body = 0

    def pause_writing(self) -> None:
        """Notes that the client reads too slowly."""
        self.is_ready = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """Notes that the client has caught up."""
        self.is_ready = not self.transport.is_closing()
        super().resume_writing()

    def write(self, data: bytes) -> None:
        """Sends a non-empty part at the end of the loop's turn."""
        outbox = self._outbox
        if not outbox.parts:
            self.loop.call_soon(outbox.send)
        outbox.parts.append((self.transport, b"%x\r\n%b\r\n" % (len(data), data)))

    def socket(self) -> int:
        """The descriptor to which coded parts may be sent now, or NO_SOCKET."""
        transport = self.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return NO_SOCKET
        return self._descriptor

    def write_coded(self, data: bytes) -> None:
        """Sends parts that have the chunked coding already, at once. `flush` must come before."""
        transport = self.transport
        if not transport.is_closing():
            try:
                transport.write(data)
            except Exception:  # other clients go on
                _cut(transport)

    def flush(self) -> None:
        """Sends all waiting parts now, also those of other connections."""
        if self._outbox.parts:
            self._outbox.send()


class _LastOrNot:
    """The transport of one response.

    The first write, the head, waits for the next write of the same turn, since each write by itself
    would wake the client. The head says whether the response is the connection's last.
    """

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = cycle.transport
        self._is_begun = False
        self._held = b""

    def write(self, data: bytes) -> None:
        """Sends data, unless it is the first."""
        if self._is_begun:
            self._transport.write(self._held + data if self._held else data)
            self._held = b""
            return
        cycle = self._cycle
        if cycle.more_body and cycle.keep_alive and cycle.response_started:
            cycle.keep_alive = False
            data = data.removesuffix(b"\r\n") + b"connection: close\r\n\r\n"
        self._is_begun, self._held = True, data
        self._connection.loop.call_soon(self._send_held)

    def is_closing(self) -> bool:
        """True if nothing can be sent any more."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection when everything is sent."""
        self._send_held()
        if self._cycle.more_body and self._cycle.response_complete:
            self._connection.finish()
        else:
            self._transport.close()

    def _send_held(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)


class _Outbox:
    """Parts of bodies from one turn of the loop, sent one right after the other.

    A step of a worker brings a token of each stream. If each token were sent at once, nearly every
    one would wake its client, which would take the processor from the work for the next token.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[asyncio.Transport, bytes]] = []

    def send(self) -> None:
        """Sends all parts whose clients are connected."""
        parts, self.parts = self.parts, []
        for transport, data in parts:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:  # other clients go on
                    _cut(transport)


def _descriptor_of(transport: asyncio.Transport) -> int:
    """The descriptor that carries what is written to a transport, as it is; else NO_SOCKET."""
    if is_ssl(transport):
        return NO_SOCKET
    sock = transport.get_extra_info("socket")
    return NO_SOCKET if sock is None else int(sock.fileno())


def _cut(transport: asyncio.Transport) -> None:
    """Ends a connection that cannot be written to, in the handler of the error."""
    log.exception("sending a part of a body failed: its connection is cut")
    transport.abort()


def _has_twice(headers: list[tuple[bytes, bytes]]) -> bool:
    """True if a field that must be unambiguous is given more than once."""
    once = [name for name, _ in headers if name in _ONCE]
    return len(once) > len(set(once))


class _UntilClosed(int):
    """The length, in uvicorn's count, of a body that ends with its connection: any."""

    def __lt__(self, _: int) -> bool:
        return False

    def __ne__(self, _: object) -> bool:
        return False

    def __sub__(self, _: int) -> "_UntilClosed":
        return self

    __hash__ = int.__hash__


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()
_feeders: WeakKeyDictionary[asyncio.AbstractEventLoop, Feeder] = WeakKeyDictionary()
