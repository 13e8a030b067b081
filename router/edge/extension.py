"""What an application finds in the scope of a request beyond ASGI: a pipe and the caller.

`router.edge.connection` puts both into `scope["extensions"]`. Other servers have neither.
"""

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "baton.pipe"


class BodyPipe(Protocol):
    """Carries parts of a body that has begun, past `send`: soon, in order, without waiting for
    anything. What goes past the pipe is sent after a `flush`.

    Who waits at a server's `send` does so in a task of its own, whose turn comes later: that costs
    more than all else that is done for a token.
    """

    is_ready: bool  # whether the client is there and reads fast enough

    def write(self, data: bytes) -> None:
        """Sends a part, which is not empty, soon."""
        ...

    def flush(self) -> None:
        """Sends what is to be sent soon: before anything goes past the pipe."""
        ...


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


def caller_of(scope: Scope) -> Caller | None:
    """The client's side of a request, if its server has that."""
    caller: Caller | None = scope.get("extensions", {}).get(EXTENSION, {}).get("caller")
    return caller


def pipe_of(scope: Scope) -> BodyPipe | None:
    """The pipe of the connection that a request came over, if its server has one."""
    pipe: BodyPipe | None = scope.get("extensions", {}).get(EXTENSION, {}).get("pipe")
    return pipe
