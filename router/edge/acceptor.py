"""Accepts connections of a listening socket, several in a turn of the loop.

libuv's servers accept one connection in a turn. If many clients come at once, those that are in
already keep the turns long, and the last ones wait until nearly all others are answered. With TLS,
asyncio's own servers would also not count handshakes, and would never change the certificate.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from router.edge.connection import Connection
from router.edge.limits import Book
from router.edge.tls import TlsFiles

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16  # then other events have their turn, and other processes get connections
SHUTDOWN_TIMEOUT_S = 5.0  # time to wait for a client's close message


class Acceptor:
    """Makes HTTP connections of accepted sockets. Connections with TLS are counted before their
    handshake, others by themselves.
    """

    def __init__(
        self, new_connection: Callable[[], Connection], *, files: TlsFiles | None, book: Book
    ) -> None:
        """`files` is None without TLS."""
        self._new_connection = new_connection
        self._files = files
        self._book = book
        self._sock: socket.socket | None = None
        self._beginning: set[asyncio.Task[None]] = set()  # connections

    def open(self, sock: socket.socket) -> None:
        """Starts to accept. The acceptor owns the socket from now on."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        sock.settimeout(0.0)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Stops accepting. Running handshakes go on."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            sock.close()

    def cut(self) -> None:
        """Cancels running handshakes."""
        for task in self._beginning:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._sock is None:
                return
            try:
                client, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor is left
                log.error("no connection can be accepted for a second: %s", error)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(1.0, self._resume)
                return
            self._take(client, str(peer[0]))

    def _resume(self) -> None:
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _take(self, client: socket.socket, address: str) -> None:
        client.settimeout(0.0)
        begun = self._begin(client, address)
        if self._files is not None and (reason := self._book.admit(address)) is not None:
            log.warning("a connection from %s was refused: %s", address, reason)
            begun.close()
            client.close()
            return
        task = self._loop.create_task(begun)
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, client: socket.socket, address: str) -> None:
        connection = self._new_connection()
        try:
            if self._files is None:
                await self._loop.connect_accepted_socket(lambda: connection, client)
            else:
                await self._shake_hands(connection, client, address, self._files)
        except (Exception, asyncio.CancelledError) as error:
            # Whatever the reason, this connection ends.
            connection.uncount()
            client.close()
            if self._files is not None:
                self._book.refuse("no TLS handshake")
            log.info("a connection from %s was closed before it began: %s", address, error)

    async def _shake_hands(
        self, connection: Connection, client: socket.socket, address: str, files: TlsFiles
    ) -> None:
        connection.count_under(address)
        await self._loop.connect_accepted_socket(
            lambda: connection,
            client,
            ssl=files.context,
            ssl_handshake_timeout=self._book.limits.head_timeout_s,
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
