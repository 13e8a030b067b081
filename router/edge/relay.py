"""Relays the connections of a listening socket to a Unix socket of this process.

gRPC's library listens only on addresses, not on existing sockets. So it listens on a Unix socket,
and the relay accepts connections from the socket that all gateways share. Bytes are relayed unread,
including TLS. At most one buffer per direction is kept in memory.
"""

import asyncio
import logging
import socket
from typing import cast

log = logging.getLogger(__name__)


class Relay:
    """Accepts from `open` to `close`; connections last until `cut`. Belongs to one event loop."""

    def __init__(self, path: str, max_connections: int) -> None:
        """`path` is the Unix socket. Connections above the limit are closed at once."""
        self._path = path
        self._max_connections = max_connections
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None

    async def open(self, sock: socket.socket) -> None:
        """Starts to accept from a listening socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Client(self._path, self._clients, self._max_connections), sock=sock
        )

    def close(self) -> None:
        """Stops accepting connections."""
        if self._server is not None:
            self._server.close()

    def cut(self) -> None:
        """Closes all connections."""
        for client in list(self._clients):
            client.cut()


class _End(asyncio.Protocol):
    """One end of a connection. Received data is written to the other end."""

    transport: asyncio.Transport

    def __init__(self, other: "_End | None" = None) -> None:
        self.other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        if self.other is not None and self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        return True  # the other direction is kept open

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            other.transport.close()


class _Client(_End):
    """The end of a connection that leads to the client."""

    def __init__(self, path: str, clients: "set[_Client]", max_clients: int) -> None:
        super().__init__()
        self._path = path
        self._clients = clients
        self._max_clients = max_clients
        self._is_lost = self._has_said_all = False
        self._early: list[bytes] = []  # data received before the Unix socket was connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._clients) >= self._max_clients:
            self.transport.abort()
            return
        self._clients.add(self)
        self._joining = asyncio.create_task(self._join())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            if not self._early:
                self.transport.pause_reading()
            self._early.append(data)
        super().data_received(data)

    def eof_received(self) -> bool:
        self._has_said_all = True
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._clients.discard(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        for end in (self, self.other):
            if end is not None:
                end.transport.abort()

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Data can arrive before this call returns; that data is forwarded at once.
            _, inner = await loop.create_unix_connection(lambda: _End(self), self._path)
        except OSError as error:
            log.warning("a connection cannot be passed on: %s", error)
            self.transport.abort()
            return
        if self._is_lost:
            inner.transport.abort()
            return
        self.other = inner
        for data in self._early:
            inner.transport.write(data)
        if self._early:
            self._early.clear()
            self.transport.resume_reading()
        if self._has_said_all:
            inner.transport.write_eof()
