"""One HTTP connection of the server, and the way past ASGI for parts of a body.

All of HTTP is uvicorn's business: parsing, heads, keep-alive, pipelining, limits, shutdown. Added
is one thing: an application may write parts of a body that it has begun straight to the transport.
`send` is a coroutine, so a task would have to be woken for each token of each stream, to do what
amounts to one call of `transport.write`; measured with 64 streams, the task costs more than all
else that is done for a token, the system call included.

The application finds the pipe in `scope["extensions"]`, which is where ASGI puts what a server can
do beyond it. It may be used between `http.response.start`, of a head without a length, and the last
`http.response.body`, by whoever answers the request: uvicorn starts the next request of a
connection only when that is sent.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.sse import BodyPipe

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
        """Sends a part, which is not empty."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def pipe_of(scope: Scope) -> BodyPipe | None:
    """The pipe of the connection that a request came over, if its server has one."""
    pipe: BodyPipe | None = scope.get("extensions", {}).get(EXTENSION, {}).get("pipe")
    return pipe
