"""Hands the listening sockets of a deployment's ports from process to process.

All gateways accept connections from one socket of a port, so the kernel has one queue of them:

- A gateway that is paused or stuck accepts no connections, so the other gateways accept all. With
  SO_REUSEPORT each process would have its own queue, and connections in a paused process's queue
  would wait or be lost.
- A gateway that dies loses no waiting connection, and its successor uses the same port. As long as
  any process has the socket open, new connections wait in the queue instead of being refused.

A process that has the listening socket also listens on a Unix socket `<port>-<process>` in a
private directory, and sends each caller a descriptor of the listening socket. On a single machine
`baton serve` makes the sockets, and is called first. On a cluster the first gateway makes the
sockets, and gateways get them from each other.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError
from router.edge.listener import BACKLOG

log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 2.0  # longest wait for the answer of a holder, which may be paused
CLOSE_TIMEOUT_S = 10.0
HTTP, GRPC = "http", "grpc"  # names of the ports
DEPLOYMENT = "deployment"  # name of the holder that lives as long as the deployment


class PortHolder:
    """Sends descriptors of a listening socket to other processes, in a thread, from `hold` to
    `close`.
    """

    def __init__(self, directory: Path, port_name: str, holder: str = DEPLOYMENT) -> None:
        """`directory` must be private: only this user may enter it."""
        self.path = directory / f"{port_name}-{holder}"
        self._thread = threading.Thread(target=self._serve, name="port holder", daemon=True)

    def hold(self, sock: socket.socket) -> None:
        """Starts to hand out this socket. `close` will close it. Raises ConfigError."""
        self._port = sock
        self._calls = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)  # a dead process may have left this file
            with _reachable(self.path) as path:
                self._calls.bind(path)
            self._calls.listen()
        except OSError as error:
            self._port.close()
            self._calls.close()
            raise ConfigError(f"{self.path}: {error.strerror or error}") from error
        self._thread.start()

    def close(self) -> None:
        """Closes the socket. The port is free once the last process has closed the socket."""
        with contextlib.suppress(OSError):
            self._calls.shutdown(socket.SHUT_RDWR)  # makes `accept` in the thread return
        self._thread.join(CLOSE_TIMEOUT_S)
        self._calls.close()
        self._port.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._calls.accept()
            except OSError:  # `close` was called
                return
            try:
                with caller:
                    caller.settimeout(TAKE_TIMEOUT_S)
                    socket.send_fds(caller, [b"1"], [self._port.fileno()])
            except OSError as error:
                log.warning("a gateway did not get the listening socket: %s", error)


def listen_on(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises ConfigError if the port is taken."""
    try:
        return _never_blocking(socket.create_server((host, port), backlog=BACKLOG))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _never_blocking(sock: socket.socket) -> socket.socket:
    """Makes the socket non-blocking. All copies of the socket in all processes share one flag, and
    Python's `dup` sets the flag to its own socket's mode. With a blocking copy, a process that
    accepts would wait for ever.
    """
    sock.settimeout(0.0)
    return sock


def take_socket(path: Path) -> socket.socket:
    """Gets the listening socket from the holder at `path`.

    Raises ConfigError.
    """
    try:
        with (
            _reachable(path) as short,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder,
        ):
            holder.settimeout(TAKE_TIMEOUT_S)
            holder.connect(short)
            _, descriptors, *_ = socket.recv_fds(holder, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the listening socket did not come from {path}: {error}") from error
    if not descriptors:
        raise ConfigError(f"the listening socket did not come from {path}")
    return _never_blocking(socket.socket(fileno=descriptors[0]))


def take_or_listen(
    directory: Path, port_name: str, process: str, address: tuple[str, int]
) -> tuple[socket.socket, PortHolder]:
    """Returns the socket of a port, and the holder that hands out this socket from this process.

    The socket comes from a process that has it already. If no process answers, this process makes
    the socket and listens. Raises ConfigError.
    """
    holder = PortHolder(directory, port_name, process)
    others = (path for path in sorted(directory.glob(f"{port_name}-*")) if path != holder.path)
    for path in others:
        try:
            sock = take_socket(path)
            break
        except ConfigError as error:
            log.info("%s", error)  # the holder has died or is paused
    else:
        sock = listen_on(*address)
    try:
        holder.hold(sock.dup())
    except BaseException:
        sock.close()
        raise
    return sock, holder


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Yields a short name of a path, because a Unix socket's address has at most 107 bytes."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
