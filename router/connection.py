"""One HTTP connection of the server, and the way past ASGI for parts of a body.

All of HTTP is uvicorn's business: parsing, heads, keep-alive, pipelining, limits, shutdown. Added
is one thing: an application may write parts of a body that it has begun straight to the transport.
`send` is a coroutine, so a task would have to be woken for each token of each stream, to do what
amounts to one call of `transport.write`; measured with 64 streams, the task costs more than all
else that is done for a token, the system call included. What is written so is sent when the loop
has done what it is at: see `_Outbox`.

The application finds the pipe in `scope["extensions"]`, which is where ASGI puts what a server can
do beyond it. It may be used between `http.response.start`, of a head without a length, and the last
`http.response.body`, by whoever answers the request: uvicorn starts the next request of a
connection only when that is sent.
"""

import asyncio
import logging
from weakref import WeakKeyDictionary

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.sse import BodyPipe

log = logging.getLogger(__name__)

EXTENSION = "baton.pipe"


class Connection(HttpToolsProtocol):
    """uvicorn's connection as a `BodyPipe`. What it carries is one chunk of HTTP/1.1's coding."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"pipe": self}}

    is_ready = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._outbox = _outboxes.setdefault(self.loop, _Outbox())
        self.is_ready = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.is_ready = False
        super().connection_lost(exc)

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


def pipe_of(scope: Scope) -> BodyPipe | None:
    """The pipe of the connection that a request came over, if its server has one."""
    pipe: BodyPipe | None = scope.get("extensions", {}).get(EXTENSION, {}).get("pipe")
    return pipe
