"""Serves an ASGI application on a socket, within limits, optionally over TLS.

A listener accepts several connections per iteration of the loop; libuv's servers accept only one.
If many clients connect at once, the work for the accepted clients makes iterations long. The last
clients would then wait until nearly all others are answered. asyncio's own TLS servers have two
further limits: they do not count handshakes, and never replace the certificate.

One sweep per second checks for overdue connections and for changed certificate files.

When a listener closes, it accepts no more connections, and running answers continue. `close` waits
for these answers up to a timeout. Then it ends them with an error, and cuts the connections that
remain.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from router.edge.connection import Clients, Connection
from router.edge.limits import Book
from router.edge.tls import TlsFiles

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16  # maximum per iteration, so that other events and processes get time
SHUTDOWN_TIMEOUT_S = 5.0  # seconds to wait for a client's close message
CUT_TIMEOUT_S = 2.0  # seconds for sending the errors that end answers
END_TIMEOUT_S = 5.0  # seconds for cut connections to end
BACKLOG = 2048  # connections that the kernel queues until they are accepted


class Listener:
    """Serves an application from `open` to `close`. Belongs to one event loop."""

    def __init__(self, app: ASGIApp, book: Book, tls: TlsFiles | None = None) -> None:
        """`book` has the limits and counts. `tls`, if given, must be open."""
        self._book = book
        self._tls = tls
        if tls is not None:
            book.tls_events = tls.counters
        self._clients = Clients(app, book)
        self._sock: socket.socket | None = None
        self._opening: set[asyncio.Task[None]] = set()  # tasks of connections without a first byte
        self._stops_draining = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, sock: socket.socket) -> None:
        """Starts to accept connections from a listening socket, which the listener now owns."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        sock.settimeout(0.0)
        self._loop.add_reader(sock.fileno(), self._accept)
        self._sweep()

    def stop_draining(self) -> None:
        """Makes `close` stop waiting for running answers."""
        self._stops_draining.set()

    async def close(self, drain_timeout_s: float, cut: Callable[[], Any]) -> None:
        """Accepts no more connections, and waits for the answers. After a timeout, calls `cut`.

        `cut` must end the remaining answers. TLS handshakes may continue until then.
        """
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        for connection in list(self._clients.connections):
            connection.shutdown()
        serving = asyncio.create_task(self._until_all_left())
        stopped = asyncio.create_task(self._stops_draining.wait())
        await asyncio.wait(
            [serving, stopped], timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        if not serving.done():
            cut()
            await asyncio.wait([serving], timeout=CUT_TIMEOUT_S)
        for task in self._opening:
            task.cancel()
        for connection in list(self._clients.connections):
            connection.cut()
        await asyncio.wait([serving], timeout=END_TIMEOUT_S)
        if self._timer is not None:
            self._timer.cancel()
        serving.cancel()

    async def _until_all_left(self) -> None:
        clients = self._clients
        while clients.connections:
            clients.ended.clear()
            await clients.ended.wait()
        if clients.tasks:
            await asyncio.wait(clients.tasks)

    def _sweep(self) -> None:
        if self._tls is not None:
            self._tls.check()
        now_s = self._loop.time()
        for connection in list(self._clients.connections):
            try:
                connection.check(now_s)
            except Exception:  # an error of one connection must not affect others
                log.exception("checking a connection failed: it is cut")
                connection.cut()
        self._timer = self._loop.call_later(self._book.sweep_every_s, self._sweep)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._sock is None:
                return
            try:
                client, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # for example, the process has no free file descriptor
                log.error("no connection can be accepted for a second: %s", error)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(1.0, self._resume)
                return
            self._admit(client, str(peer[0]))

    def _resume(self) -> None:
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _admit(self, client: socket.socket, address: str) -> None:
        client.settimeout(0.0)
        reason = self._book.admit(address)
        if reason is not None:
            log.warning("a connection from %s was refused: %s", address, reason)
            if self._tls is not None:
                client.close()
                return
        connection = Connection(self._clients, address, reason)
        task = self._loop.create_task(self._open(connection, client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: Connection, client: socket.socket) -> None:
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {
                "ssl": self._tls.context,
                "ssl_handshake_timeout": self._book.head_timeout_s,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
            }
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client, **secured)
        except (Exception, asyncio.CancelledError) as error:
            # The connection is closed whatever the reason is.
            connection.uncount()
            client.close()
            if self._tls is not None:
                self._book.refuse("no TLS handshake")
            address = connection.address
            log.info("a connection from %s was closed before it began: %s", address, error)
