"""What an application finds in the scope of a request beyond ASGI: a pipe and the caller.

`router.edge.connection` puts both into `scope["extensions"]`. Other servers have neither.
"""

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "baton.pipe"
NO_SOCKET = -1  # an invalid descriptor


class BodyPipe(Protocol):
    """Carries parts of a body that has begun, in order and without waiting, past `send`.

    Call `flush` before sending anything by other ways. A wait at a server's `send` needs a task,
    whose turn comes later. That costs more than everything else that is done for a token.
    """

    is_ready: bool  # the client is connected and reads fast enough

    def write(self, data: bytes) -> None:
        """Sends a non-empty part soon."""
        ...

    def socket(self) -> int:
        """The descriptor to which coded parts may be sent now, or NO_SOCKET.

        It may be used before anything else is done. Call `flush` before.
        """
        ...

    def write_coded(self, data: bytes) -> None:
        """Sends parts that have HTTP's chunked coding already, at once. Call `flush` before."""
        ...

    def cut(self) -> None:
        """Ends the connection at once, as its body cannot go on."""
        ...

    def flush(self) -> None:
        """Sends all parts now: needed before sending anything by other ways."""
        ...


class Caller:
    """The client's side of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self._on_gone: Callable[[], None] | None = None
        self._is_gone = False
        self.streams_body = False

    def take_body(self) -> bytes | None:
        """The request's body if it has come whole and was not read yet, else None."""
        cycle = self.cycle
        if cycle.more_body or self._is_gone or cycle.waiting_for_100_continue:
            return None
        data, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()  # what `receive` does
        cycle.flow.resume_reading()
        return data

    def stream_body(self) -> None:
        """Says that the application takes the body in pieces as it comes.

        The body then has no deadline as a whole, but each piece has. What was taken does not count
        as a body in memory.
        """
        self.streams_body = True

    def watch(self, on_gone: Callable[[], None] | None) -> bool:
        """Sets the callback for the client's leaving, or none. False: it has left already."""
        self._on_gone = on_gone
        return not self._is_gone

    def leave(self) -> None:
        """Notes that the client has left, and tells uvicorn, which marks only the last request."""
        self._is_gone = True
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self._on_gone is not None:
            self._on_gone()


def caller_of(scope: Scope) -> Caller | None:
    """The client's side of a request, if its server offers it."""
    caller: Caller | None = scope.get("extensions", {}).get(EXTENSION, {}).get("caller")
    return caller


def pipe_of(scope: Scope) -> BodyPipe | None:
    """The pipe of a request's connection, if its server offers one."""
    pipe: BodyPipe | None = scope.get("extensions", {}).get(EXTENSION, {}).get("pipe")
    return pipe
