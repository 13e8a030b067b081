"""Messages between rank 0 and another rank: MessagePack with a length prefix on a socket pair."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from deploy.base.spec import WorkerSpec
from engine.errors import ProtocolError
from engine.messages import Incarnation, TransferAddress
from engine.worker.events import TransferOrder, TransferReport
from engine.worker.ranks import RankPlace
from kvtransfer.messages import Identity

LENGTH = struct.Struct("<I")
MAX_BYTES = 64 * 2**20
IDLE_S = 1.0


class RankSpec(msgspec.Struct, frozen=True, tag=True):
    """The parameters of a rank's start.

    The message carries the descriptor of the socket for steps.
    """

    place: RankPlace
    worker: WorkerSpec
    directory: str  # directory of the model
    rendezvous: str  # file by which the ranks find each other


class RankJoins(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank has started and joins the rendezvous."""


class RankOpened(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank has loaded its part of the model."""

    pid: int


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank's start failed."""

    reason: str
    is_config: bool  # True if the operator can fix the cause (ConfigError)


class OpenTransfer(msgspec.Struct, frozen=True, tag=True):
    """Orders a rank to open its transfer endpoint."""

    incarnation: Incarnation
    identity: Identity  # identity of this rank


class TransferOpened(msgspec.Struct, frozen=True, tag=True):
    """Reports that the rank's transfer endpoint listens."""

    address: TransferAddress


class TransferRefused(msgspec.Struct, frozen=True, tag=True):
    """Reports that the rank's transfer endpoint cannot be opened."""

    reason: str


class RankCounters(msgspec.Struct, frozen=True, tag=True):
    """Counters of a rank's opening and of its endpoint since the start. Sent each second as a sign
    of life, and with each report.
    """

    counters: dict[str, float]


ToRank = RankSpec | OpenTransfer | TransferOrder
FromRank = (
    RankJoins
    | RankOpened
    | RankRefused
    | TransferOpened
    | TransferRefused
    | RankCounters
    | TransferReport
)

_encode = msgspec.msgpack.Encoder().encode


class FrameSocket:
    """One end of a socket pair. Any thread may send. Only one thread may receive."""

    def __init__(
        self, connection: socket.socket, *, on_idle: Callable[[], None] | None = None
    ) -> None:
        """`on_idle` is called after each second without a message.

        `receive` raises the errors of `on_idle`.
        """
        self._connection = connection
        self._on_idle = on_idle
        if on_idle is not None:
            timeval = struct.pack("ll", int(IDLE_S), 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Sends a message. Raises OSError if the other end has closed or does not read."""
        body = _encode(message)
        with self._lock:
            self._connection.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> bytes | None:
        """Waits for a message and returns it.

        None if the other end has closed. Raises ProtocolError.
        """
        head = self._read(LENGTH.size)
        if head is None:
            return None
        (num_bytes,) = LENGTH.unpack(head)
        if num_bytes > MAX_BYTES:
            raise ProtocolError(f"a message of {num_bytes} bytes")
        return self._read(num_bytes)

    def close(self) -> None:
        """Closes the connection. A thread that waits in `receive` gets None."""
        with contextlib.suppress(OSError):  # the other end has closed the connection already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes | None:
        parts: list[bytes] = []
        while num_bytes:
            try:
                part = self._connection.recv(min(num_bytes, 2**20))
            except BlockingIOError:
                assert self._on_idle is not None
                self._on_idle()
                continue
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)
