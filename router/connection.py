"""One HTTP connection of the server, and the ways past ASGI.

All of HTTP is uvicorn's business: parsing, heads, keep-alive, pipelining, limits, shutdown. Added
are two things, which an application finds in `scope["extensions"]`, where ASGI puts what a server
can do beyond it.

The *pipe*: an application may write parts of a body that it has begun straight to the transport.
`send` is a coroutine, so a task would have to be woken for each token of each stream, to do what
amounts to one call of `transport.write`; measured with 64 streams, the task costs more than all
else that is done for a token, the system call included. What is written so is sent when the loop
has done what it is at: see `_Outbox`.

It may be used between `http.response.start`, of a head without a length, and the last
`http.response.body`, by whoever answers the request: uvicorn starts the next request of a
connection only when that is sent.

The *caller*: a body that has come already need not be waited for, and whoever answers is told when
the client has left, where with `receive` alone a task would have to wait for that all the time.

The head of a response is sent with what follows it in the same turn, in one piece.
"""

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.sse import BodyPipe

log = logging.getLogger(__name__)

EXTENSION = "baton.pipe"


class Caller:
    """The client's side of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_gone: Callable[[], None] | None = None
        self._is_gone = False

    def take_body(self) -> bytes | None:
        """The request's body, if all of it is there and nobody has read any of it."""
        cycle = self._cycle
        if cycle.more_body or self._is_gone or cycle.waiting_for_100_continue:
            return None
        data, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()  # what `receive` does
        cycle.flow.resume_reading()
        return data

    def watch(self, on_gone: Callable[[], None] | None) -> bool:
        """Whoever is to be told when the client leaves, or nobody. False: it has left already."""
        self._on_gone = on_gone
        return not self._is_gone

    def leave(self) -> None:
        """The client has left."""
        self._is_gone = True
        if self._on_gone is not None:
            self._on_gone()


class Connection(HttpToolsProtocol):
    """uvicorn's connection as a `BodyPipe`. What it carries is one chunk of HTTP/1.1's coding."""

    is_ready = False

    def on_headers_complete(self) -> None:
        """A request begins; its task has not run yet."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            cycle.transport = _WholeHead(cycle.transport, self.loop)  # type: ignore[assignment]
            caller = Caller(cycle)
            self._callers.append(caller)
            self.scope["extensions"] = {EXTENSION: {"pipe": self, "caller": caller}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._outbox = _outboxes.setdefault(self.loop, _Outbox())
        self._callers: list[Caller] = []  # of requests that are not answered yet
        self.is_ready = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.is_ready = False
        super().connection_lost(exc)
        for caller in self._callers:
            caller.leave()
        self._callers.clear()

    def on_response_complete(self) -> None:
        """A request is answered. They are answered one after the other."""
        if self._callers:
            del self._callers[0]
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.is_ready = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self.is_ready = not self.transport.is_closing()
        super().resume_writing()

    def write(self, data: bytes) -> None:
        """Sends a part, which is not empty, when the loop has done what it is at."""
        outbox = self._outbox
        if not outbox.parts:
            self.loop.call_soon(outbox.send)
        outbox.parts.append((self.transport, b"%x\r\n%b\r\n" % (len(data), data)))

    def flush(self) -> None:
        """Sends what is to be sent soon, of other connections too."""
        self._outbox.send()


class _WholeHead:
    """A transport whose first write, the head of a response, waits for the next one in its turn.

    Each write by itself would wake the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._is_begun = False
        self._held = b""

    def write(self, data: bytes) -> None:
        """Sends data, unless it is the first."""
        if self._is_begun:
            self._transport.write(self._held + data if self._held else data)
            self._held = b""
        else:
            self._is_begun, self._held = True, data
            self._loop.call_soon(self._send_held)

    def is_closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection when all is sent."""
        self._send_held()
        self._transport.close()

    def _send_held(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)


class _Outbox:
    """Parts of bodies that came in one turn of a loop, to be sent one right after the other.

    A step of a worker brings a token of each stream. Were each sent where it comes up, with the
    work for the next one in between, nearly every one would wake its client anew, who takes the
    processor away.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[asyncio.Transport, bytes]] = []

    def send(self) -> None:
        """Sends all, but to clients that are gone. One that cannot be written to is cut off."""
        parts, self.parts = self.parts, []
        for transport, data in parts:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:  # of no concern to the other clients
                    log.exception("a part of a body was not sent: its connection ends")
                    transport.abort()


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()


def caller_of(scope: Scope) -> Caller | None:
    """The client's side of a request, if its server has that."""
    caller: Caller | None = scope.get("extensions", {}).get(EXTENSION, {}).get("caller")
    return caller


def pipe_of(scope: Scope) -> BodyPipe | None:
    """The pipe of the connection that a request came over, if its server has one."""
    pipe: BodyPipe | None = scope.get("extensions", {}).get(EXTENSION, {}).get("pipe")
    return pipe
