"""Serves an ASGI application on a socket: uvicorn, within limits, optionally over TLS.

One sweep a second looks for overdue connections and for changed certificate files.

When a listener closes, it takes no more connections, and running answers go on. `close` waits for
them up to a timeout. Then it asks the rest to end, and cuts connections that do not.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from router.edge.acceptor import Acceptor
from router.edge.connection import Connection
from router.edge.limits import Book
from router.edge.tls import TlsFiles

log = logging.getLogger(__name__)

CUT_TIMEOUT_S = 2.0  # time to send the errors that end answers
END_TIMEOUT_S = 5.0  # time for cut connections to end
BACKLOG = 2048  # connections that the kernel keeps until they are accepted


class Listener:
    """Serves an application from open to close. Belongs to one event loop."""

    def __init__(self, app: ASGIApp, book: Book, tls: TlsFiles | None = None) -> None:
        """`book` has the limits and counts. `tls` must be open."""
        self._book = book
        self._tls = tls
        if tls is not None:
            book.tls_events = tls.counters
        self._acceptor = Acceptor(self._new_connection, files=tls, book=book)
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(Connection, book=book)),
            ws="none",  # else a request could change to a protocol without limits
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._stops_draining = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, sock: socket.socket) -> None:
        """Starts to serve connections of a listening socket."""
        self._loop = asyncio.get_running_loop()
        self._server.config.load()  # connections need it
        self._acceptor.open(sock)
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        self._sweep()

    def stop_draining(self) -> None:
        """Makes `close` stop waiting for running answers."""
        self._stops_draining.set()

    async def close(self, drain_timeout_s: float, cut: Callable[[], Any]) -> None:
        """Takes no more connections and waits for answers; after the timeout, `cut` ends them."""
        self._server.should_exit = True
        self._acceptor.close()
        await self._ended(drain_timeout_s)
        if not self._serving.done():
            cut()
            await asyncio.wait([self._serving], timeout=CUT_TIMEOUT_S)
        self._acceptor.cut()
        for connection in self._connections:
            connection.cut()
        await asyncio.wait([self._serving], timeout=END_TIMEOUT_S)
        if self._timer is not None:
            self._timer.cancel()
        self._serving.cancel()

    def _new_connection(self) -> Connection:
        """Makes the protocol of an accepted connection, as uvicorn does."""
        server = self._server
        return Connection(
            config=server.config, server_state=server.server_state, app_state={}, book=self._book
        )

    async def _ended(self, timeout_s: float) -> None:
        """Returns when all answers have ended, after the timeout, or on `stop_draining`."""
        cut = asyncio.create_task(self._stops_draining.wait())
        await asyncio.wait(
            [self._serving, cut], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        cut.cancel()

    @property
    def _connections(self) -> list[Connection]:
        return cast("list[Connection]", list(self._server.server_state.connections))

    def _sweep(self) -> None:
        if self._tls is not None:
            self._tls.check()
        now_s = self._loop.time()
        for connection in self._connections:
            try:
                connection.check(now_s)
            except Exception:  # other connections go on
                log.exception("checking a connection failed: it is cut")
                connection.cut()
        self._timer = self._loop.call_later(self._book.limits.sweep_every_s, self._sweep)
