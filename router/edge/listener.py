"""An ASGI application on a socket: uvicorn, within limits, over TLS where that is wanted.

One sweep a second looks for connections that are overdue and for certificate files that changed.

The end of a listener: it takes no connection any more, and what is under way goes on. `close`
waits for that, as long as it is told to; whatever is left then is asked to end by itself, and cut
off if it does not.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from router.edge.connection import Connection
from router.edge.limits import Book
from router.edge.tls import TlsAcceptor, TlsFiles

log = logging.getLogger(__name__)

CUT_TIMEOUT_S = 2.0  # answers that are ended have been sent, error and all
END_TIMEOUT_S = 5.0  # connections that are cut off are gone
BACKLOG = 2048  # connections


class Listener:
    """Serves an application from open to close. To be used on one event loop."""

    def __init__(self, app: ASGIApp, book: Book, tls: TlsFiles | None = None) -> None:
        """`book` is where it counts; its limits hold. `tls` must be open."""
        self._book = book
        self._tls = tls
        self._acceptor: TlsAcceptor | None = None
        if tls is not None:
            book.tls_events = tls.counters
            self._acceptor = TlsAcceptor(self._new_connection, files=tls, book=book)
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(Connection, book=book)),
            ws="none",  # else a request could change to a protocol without limits
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
        )
        self._server = uvicorn.Server(config)
        self._hurried = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, sock: socket.socket) -> None:
        """Serves connections of a socket that listens."""
        self._loop = asyncio.get_running_loop()
        self._server.config.load()  # which connections need
        sockets = [sock]
        if self._acceptor is not None:
            self._acceptor.open(sockets.pop())
        self._serving = asyncio.create_task(self._server.serve(sockets=sockets))
        self._sweep()

    def hurry(self) -> None:
        """Has `close` wait no longer for what is under way."""
        self._hurried.set()

    async def close(self, drain_timeout_s: float, cut: Callable[[], Any]) -> None:
        """Takes no more, and waits so long for what is under way; `cut` ends what is left then."""
        self._server.should_exit = True
        if self._acceptor is not None:
            self._acceptor.close()
        await self._ended(drain_timeout_s)
        if not self._serving.done():
            cut()
            await asyncio.wait([self._serving], timeout=CUT_TIMEOUT_S)
        if self._acceptor is not None:
            self._acceptor.cut()
        for connection in self._connections:
            connection.cut()
        await asyncio.wait([self._serving], timeout=END_TIMEOUT_S)
        if self._timer is not None:
            self._timer.cancel()
        self._serving.cancel()

    def _new_connection(self) -> Connection:
        """As uvicorn makes one for a connection that it accepted."""
        server = self._server
        return Connection(
            config=server.config, server_state=server.server_state, app_state={}, book=self._book
        )

    async def _ended(self, timeout_s: float) -> None:
        """Returns when nothing is under way, in so many seconds, or when there is a hurry."""
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait(
            [self._serving, hurried], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()

    @property
    def _connections(self) -> list[Connection]:
        return cast("list[Connection]", list(self._server.server_state.connections))

    def _sweep(self) -> None:
        if self._tls is not None:
            self._tls.look()
        now_s = self._loop.time()
        for connection in self._connections:
            try:
                connection.look(now_s)
            except Exception:  # of no concern to the others
                log.exception("a connection could not be looked at: it ends")
                connection.cut()
        self._timer = self._loop.call_later(self._book.limits.sweep_every_s, self._sweep)
