"""One HTTP/1.1 connection of the server, within the limits of `router.edge.limits`.

httptools parses requests. For each request there is an `Exchange`, which a task of the application
answers. The exchanges of a connection are answered one after the other.

Parts of bodies written through the pipe are sent at the end of the loop's iteration: see `Outbox`.

If a client exceeds a limit, its connection is closed. An error response is sent first, unless
another response has begun. If a request is answered before its body is complete, the connection
ends with this response. Further input is discarded for a moment, so that the client can read the
response.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from operator import itemgetter
from typing import cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope

from router.edge.exchange import EXCHANGE, PIPE, BodyPipe, Exchange, Outbox
from router.edge.limits import (
    FIELD_WORK,
    FREE_PARTS,
    MAX_HEADERS,
    MAX_PIPELINED,
    MIN_PART_BYTES,
    PART_WORK,
    Book,
    ConnectionTimes,
    Feeder,
    Overdue,
)
from router.edge.responses import (
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

HIGH_WATER_BYTES = 65_536  # number of unread bytes at which reading of a body pauses
_name_of = itemgetter(0)


class _NotParsed(Exception):
    """Stops the parser from within a callback. The parser does not pass the exception on."""


@dataclass(eq=False, slots=True)
class Clients:
    """The connections of a listener, the tasks that answer them, and the objects they share."""

    app: ASGIApp
    book: Book
    connections: "set[Connection]" = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever a connection ends
    outbox: Outbox = field(default_factory=Outbox)
    feeder: Feeder = field(default_factory=Feeder)


class Connection(BodyPipe):
    """One connection: parses requests, and starts a task to answer each, one after the other."""

    def __init__(self, clients: Clients, address: str = "", refusal: str | None = None) -> None:
        """The book has admitted `address`, unless `refusal` is the reason to refuse it."""
        super().__init__(clients.outbox)
        self._clients = clients
        self._book = clients.book
        self._feeder = clients.feeder
        self._exchanges: list[Exchange] = []  # unanswered exchanges, oldest first
        self._present: Exchange | None = None  # the exchange whose body is arriving
        self.address = address
        self._reason = refusal
        self._is_counted = refusal is None
        self._is_last = False  # the last response was sent, so input is discarded
        self._is_draining = False
        self._num_fed = 0  # bytes since the parser last completed a field or a piece of a body
        self._num_body = 0  # bytes of an incomplete body
        self._has_head = self._expects_continue = False  # about the request that is being parsed
        self._num_parts = self._num_parts_bytes = 0  # number and bytes of the present body's parts
        self._refusal: EdgeRefusal | None = None  # why a callback stopped the parser
        self._times = ConnectionTimes(self._loop.time())
        self._url = b""  # as far as the present head has arrived
        self._headers: list[tuple[bytes, bytes]] = []

    # ------------------------------------------------------------ the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepares to parse requests, or refuses the connection."""
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._parser = httptools.HttpRequestParser(self)
        # A client may send more data even if the response will be the last one of its connection.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._clients.connections.add(self)
        peer = transport.get_extra_info("peername")
        local = transport.get_extra_info("sockname")
        is_tls = transport.get_extra_info("sslcontext") is not None
        self._ends: Scope = {
            "client": tuple(peer[:2]) if peer else None,
            "server": tuple(local[:2]) if local else None,
            "scheme": "https" if is_tls else "http",
        }
        sock = None if is_tls else transport.get_extra_info("socket")
        if sock is not None:
            self.descriptor = int(sock.fileno())
        self.is_ready = True
        if self._reason is not None:
            self._is_last = True
            refusal = EdgeRefusal(503, "Service Unavailable", "overloaded", self._reason)
            transport.write(refusal.response())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        self.is_ready = False
        self._clients.connections.discard(self)
        self._clients.ended.set()
        self._feeder.remove(self)
        if self._num_body:
            self._remove_body()
        self.uncount()
        self._is_writable.set()
        if self._exchanges:
            self._leave_exchanges()
        del self._parser  # the parser refers to this object

    def data_received(self, data: bytes) -> None:
        """Parses input. After the last response, input is discarded."""
        if not self._is_last:
            self._times.idle_s = None
            self._feeder.feed(self, data)

    # ------------------------------------------------------------ the feeder's side

    def parse(self, data: bytes | memoryview) -> bool:
        """Parses a slice of input, as a `FedConnection`."""
        times = self._times
        if times.head_s is None and times.body_s is None:
            times.head_s = self._loop.time()
        times.has_begun = True
        self._num_fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no other protocol is supported
            if self._present is not None:
                self._present.keep_alive = False
            self._is_last = True
        except httptools.HttpParserError:
            self._refuse(self._refusal or NOT_HTTP)
        else:
            if self._num_fed > self._book.max_head_bytes:
                self._refuse(LONG_HEAD)
        return not self._is_last and not self.transport.is_closing()

    def hold(self) -> None:
        """Stops reading until the waiting input is parsed, as a `FedConnection`."""
        self.transport.pause_reading()

    def let_go(self) -> None:
        """Resumes reading as a `FedConnection`, unless reading is paused for the application."""
        if not (self.is_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    # ------------------------------------------------------------ the parser's side

    def on_url(self, url: bytes) -> None:
        """Adds a part of the request's URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header field. Drops trailers, which come after the body."""
        self._feeder.work_left -= FIELD_WORK
        if self._has_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Creates the exchange of a request, and its task if no earlier exchange is unanswered."""
        self._check_head()
        self._has_head = True
        self._num_fed = self._num_parts = self._num_parts_bytes = 0
        self._times.head_s, self._times.body_s = None, self._loop.time()
        version, url = self._parser.get_http_version(), httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            **self._ends,
        }
        may_stay = version != "1.0" and self._parser.should_keep_alive() and not self._is_draining
        exchange = Exchange(
            self, scope, keep_alive=may_stay, expects_continue=self._expects_continue
        )
        scope[EXCHANGE] = self._present = exchange
        scope[PIPE] = self if version == "1.1" else None  # HTTP/1.0 has no chunks
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start(exchange)
        else:
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Adds a part of the present body."""
        book, present = self._book, self._present
        assert present is not None
        self._num_fed = 0
        self._feeder.work_left -= PART_WORK
        self._num_parts += 1
        self._num_parts_bytes += len(body)
        if self._num_parts > FREE_PARTS + self._num_parts_bytes // MIN_PART_BYTES:
            self._raise(SMALL_PARTS)
        if present.streams_body and not present.is_complete:
            self._remove_body()  # only bodies that the application has not taken are counted
            self._times.body_s = self._loop.time()
        else:
            self._num_body += len(body)
            book.bodies_bytes += len(body)
            if book.bodies_bytes > book.max_bodies_bytes:
                self._raise(NO_ROOM)
        if not present.is_complete:
            present.body += body
            present.arrived.set()
            if len(present.body) > HIGH_WATER_BYTES:
                self.pause_reading()

    def on_message_complete(self) -> None:
        """Ends the input of a request. Its body no longer counts as incomplete."""
        self._book.bodies_bytes -= self._num_body
        self._num_body = self._num_fed = 0
        self._has_head = self._expects_continue = False
        self._url, self._headers = b"", []
        # No timeout runs until the first byte of the next request.
        self._times.head_s = self._times.body_s = None
        present = self._present
        assert present is not None
        if present.is_complete:
            self._present = None
        else:
            present.more_body = False
            present.arrived.set()

    def _check_head(self) -> None:
        fields, max_bytes = self._headers, self._book.max_head_bytes
        if len(fields) > MAX_HEADERS:
            self._raise(LONG_HEAD)
        if self._num_fed > max_bytes:  # this number may include the end of a body, so count again
            num_bytes = sum([len(name) + len(value) + 4 for name, value in fields])
            if len(self._url) + num_bytes > max_bytes:
                self._raise(LONG_HEAD)
        if len(self._exchanges) > MAX_PIPELINED:
            self._raise(TOO_MANY)
        if not self._url.isascii():
            self._raise(NOT_HTTP)
        names = list(map(_name_of, fields))  # a proxy might read the other of two fields
        if names.count(b"host") > 1 or names.count(b"authorization") > 1:
            self._raise(TWICE)

    def _raise(self, refusal: EdgeRefusal) -> None:
        """Stops the parser, and stores the refusal."""
        self._refusal = refusal
        raise _NotParsed

    # ------------------------------------------------------------ the exchanges' side

    def _start(self, exchange: Exchange) -> None:
        tasks = self._clients.tasks
        task = self._loop.create_task(exchange.run(self._clients.app))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def answered(self, exchange: Exchange) -> None:
        """Ends the oldest exchange, because its response is complete."""
        self._exchanges.remove(exchange)
        if exchange is self._present and not exchange.more_body:
            self._present = None
        now_s, times = self._loop.time(), self._times
        if times.head_s is not None:  # the timeouts of the next request start now
            times.head_s = now_s
        if times.body_s is not None:
            times.body_s = now_s
        if not exchange.keep_alive:
            self._finish() if exchange.more_body else self.transport.close()
        if self.transport.is_closing():
            return
        if self.is_paused:
            self.resume_reading()
        if self._exchanges:
            self._start(self._exchanges[0])
        else:
            times.idle_s = now_s

    def _finish(self) -> None:
        """Discards further input for a moment, as the connection's last response was sent."""
        if self.transport.is_closing():
            return
        self._is_last = True
        self._feeder.remove(self)
        self._remove_body()
        self._times.last_s = self._loop.time()
        self.resume_reading()

    def _leave_exchanges(self) -> None:
        for exchange in self._exchanges:
            exchange.leave()
        self._exchanges.clear()

    def _remove_body(self) -> None:
        self._book.bodies_bytes -= self._num_body
        self._num_body = 0

    # ------------------------------------------------------------ the listener's side

    def uncount(self) -> None:
        """Removes this connection from the counts."""
        if self._is_counted:
            self._is_counted = False
            self._book.leave(self.address)

    def check(self, now_s: float) -> None:
        """Closes the connection if it is overdue."""
        exchanges = self._exchanges
        why = self._times.overdue(
            now_s,
            self._book.head_timeout_s,
            num_unsent=self.transport.get_write_buffer_size(),
            is_answered=len(exchanges) > 1
            or (len(exchanges) == 1 and (exchanges[0].has_started or not exchanges[0].more_body)),
        )
        match why:
            case None:
                return
            case Overdue.LINGER:
                self.transport.close()
                self._times.last_s = None  # unsent data may still stall the connection
            case Overdue.STALLED:
                log.warning("a connection from %s is cut: %s", self.address, self._book.refuse(why))
                self.transport.abort()
            case Overdue.SILENT:
                self._book.refuse(why)
                self.transport.close()
            case Overdue.IDLE:
                self.transport.close()
            case _:
                self._refuse(SLOW_HEAD if why is Overdue.HEAD else SLOW_BODY)

    def shutdown(self) -> None:
        """Accepts no further request. A request that has begun to arrive is still answered."""
        self._is_draining = True
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        elif not (self._times.head_s is not None and self._times.has_begun):
            self.transport.close()

    def _refuse(self, refusal: EdgeRefusal) -> None:
        self._book.refuse(refusal.message)
        log.warning("a connection from %s is ended: %s", self.address, refusal.message)
        exchanges = self._exchanges
        if len(exchanges) > 1 or (exchanges and exchanges[0].has_started):
            self.transport.close()  # no error can be sent in the middle of another answer
            return
        if not self.transport.is_closing():
            self.transport.write(refusal.response())
        self._finish()
        self._leave_exchanges()
