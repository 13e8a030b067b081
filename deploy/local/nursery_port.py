"""Other processes of this user, such as Ray actors, request children from a nursery by a port.

The port is a Unix socket in a private folder. The nursery's owner listens there, and forwards
requests to the nursery. The child's pipes and news connect the child directly to the requesting
process. A connection carries one request, as described in `deploy.local.nursery`, or `GIVE_UP`.
"""

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from deploy.local.nursery import (
    MAX_NEWS_BYTES,
    SEND_TIMEOUT_S,
    Child,
    Forks,
    Nursery,
    ask_for_child,
)

log = logging.getLogger(__name__)

GIVE_UP = b"give up"
REQUEST_TIMEOUT_S = 5.0
BACKLOG = 64
_CLOSED = (errno.EINVAL, errno.EBADF)
_PEER = struct.Struct("iII")  # process, user and group id: ucred in unix(7)


class NurseryPort:
    """The owner's side of the port: a thread forwards requests, from `open` to `close`."""

    def __init__(self, nursery: Nursery, path: Path) -> None:
        self.path = path
        self._nursery = nursery
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve, name="nursery port", daemon=True)

    def open(self) -> None:
        """Starts to listen. Raises OSError."""
        self._listener.bind(str(self.path))
        self._listener.listen(BACKLOG)
        self._thread.start()

    def close(self) -> None:
        """Closes the port. Later requests are refused."""
        with contextlib.suppress(OSError):  # the socket never listened
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                asks, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in _CLOSED:
                    return
                log.warning("a request for a process is lost: %s", error)
                continue
            with asks:
                try:
                    self._pass_on(asks)
                except OSError as error:  # the requester notices that its sockets are closed
                    log.warning("a request for a process is refused: %s", error)

    def _pass_on(self, asks: socket.socket) -> None:
        peer = asks.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.geteuid():
            raise PermissionError("it comes from another user")
        asks.settimeout(REQUEST_TIMEOUT_S)
        request, descriptors, *_ = socket.recv_fds(asks, MAX_NEWS_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        try:
            if request == GIVE_UP:
                self._nursery.give_up()
            elif len(descriptors) == 3:
                self._nursery.pass_on(request, descriptors)
        finally:
            for each in descriptors:
                os.close(each)


class DistantNursery(Forks):
    """The requester's side of the port. `path` is the path of the port's socket."""

    def __init__(self, path: str) -> None:
        self._path = path

    def fork(self, kind: str) -> Child:
        """Requests a child, which becomes a service of that kind. Raises OSError."""
        return ask_for_child(kind, self._send)

    def give_up(self) -> None:
        """Asks the owner to kill a nursery that does not answer."""
        with contextlib.suppress(OSError):  # the nursery's owner and the nursery have ended
            self._send(GIVE_UP, [])

    def _send(self, request: bytes, descriptors: Sequence[int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(SEND_TIMEOUT_S)
            connection.connect(self._path)
            socket.send_fds(connection, [request], descriptors)
