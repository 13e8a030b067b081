"""Sealed streams: messages over a connection, encrypted and authenticated with AEGIS.

C++ does the work (`src/stream.h`). To send, it encrypts records into a buffer that fits the
processor's caches, and sends the buffer. To receive, it fills such a buffer, and decrypts the
buffer to the places of the records. AEGIS-128L (RFC 10032) comes from libsodium, which ZeroMQ
includes for CURVE. AEGIS-128L seals 15 GiB/s, AES-GCM of OpenSSL 3.0 only 4. If both ends compute
several *lanes* in parallel, streams use AEGIS-128X2 or AEGIS-128X4 (`src/aegis.h`), which is two to
three times as fast.

Each stream has its own key. Each direction numbers its messages, and the number is the message's
nonce.
"""

import ctypes
import ctypes.util
import socket
from array import array
from collections.abc import Iterator, Sequence
from ctypes import byref, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from engine.errors import BatonError
from engine.native.library import library
from kvtransfer.memory import Blocks
from kvtransfer.native.copying import Cipher, Received, Records, records_struct

KEY_BYTES = 16
_NO_RECORDS = np.empty((0, 1), np.uint8)


class CannotSeal(BatonError):
    """Streams cannot be sealed here: libsodium lacks AEGIS-128L, or the processor lacks AES."""


class StreamStop(IntEnum):
    """The reason why `send` or `receive` returned; mirrors `Stop` in stream.h."""

    BLOCKED = 0  # the connection cannot send or receive now
    DONE = 1  # all queued data is sent
    MORE = 2  # the byte budget of the call is used up
    NOTE = 3  # a note has been received
    LOST = 4  # the connection is lost
    BAD = 5  # the received bytes are not the peer's next message


class RecordFrame(NamedTuple):
    """The records that follow a note: these rows of an array. A negative id stands for no row."""

    records: Blocks
    ids: "array[int]"
    struct: Records

    @classmethod
    def of(cls, records: Blocks, ids: Sequence[int]) -> "RecordFrame":
        """Returns the frame of these rows of `records` [n, record_bytes]. Rows must be
        contiguous.
        """
        numbers = array("q", ids)
        return cls(records, numbers, records_struct(records, numbers.buffer_info()[0]))


@cache
def _cipher() -> Cipher | None:
    for path in _places_of_libsodium():
        try:
            library = ctypes.CDLL(path)
            seal, unseal = (
                getattr(library, f"crypto_aead_aegis128l_{verb}_detached")
                for verb in ("encrypt", "decrypt")
            )
            if library.sodium_init() >= 0 and library.sodium_runtime_has_aesni():
                return Cipher(_address(seal), _address(unseal))
        except (OSError, AttributeError):  # the library is absent, or older than 1.0.19
            continue
    return None


@cache
def _wide_cipher() -> tuple[int, Cipher]:
    """Returns the largest number of lanes that C++ computes in parallel, and its cipher; 1 without
    lanes.
    """
    cipher = Cipher()
    return library().baton_wide_cipher(byref(cipher)), cipher


def agreed_lanes(lanes_of_peer: int | None = None) -> int:
    """Returns the number of lanes of a stream to a peer. Without a peer, returns this host's
    maximum.
    """
    lanes, _ = _wide_cipher()
    return lanes if lanes_of_peer in (lanes, None) else 1


def _places_of_libsodium() -> Iterator[str]:
    """Yields the file names of libsodium: the copy that pyzmq includes, then the system's
    library.
    """
    brought = Path(zmq.__file__).parents[1] / "pyzmq.libs"
    yield from map(str, brought.glob("libsodium*"))
    system = ctypes.util.find_library("sodium")
    if system is not None:
        yield system


def can_seal() -> bool:
    """True if this host can seal streams."""
    return _cipher() is not None


class SealedStream:
    """One end of a sealed stream over a non-blocking connection. Used by one thread at a time."""

    def __init__(
        self,
        connection: socket.socket,
        key: bytes,
        *,
        is_source: bool,
        others: int,
        lanes: int = 1,
    ) -> None:
        """Takes over the connection. Raises CannotSeal.

        In the middle of a frame, a call with `may_wait` waits for a few milliseconds. The wait ends
        early if the epoll descriptor `others` becomes ready. The peer must use the same number of
        `lanes`.
        """
        assert len(key) == KEY_BYTES
        native, cipher = library(), _cipher()
        if agreed_lanes(lanes) > 1:
            _, cipher = _wide_cipher()
        if cipher is None:
            raise CannotSeal("no libsodium with AEGIS-128L, or no AES")
        self._native = native
        self._connection = connection
        self._others = others
        self._stream = native.baton_stream_open(
            connection.fileno(), byref(cipher), key, int(is_source)
        )
        self._received = Received()
        self._nothing = RecordFrame.of(_NO_RECORDS, ())

    def fileno(self) -> int:
        """The descriptor of the stream's connection."""
        return self._connection.fileno()

    def note(self, note: bytes) -> bool:
        """Queues a note for `send`, and starts a new frame. Returns False if the queue is full."""
        return bool(self._native.baton_stream_note(self._stream, note, len(note)))

    def send(
        self, frame: RecordFrame | None, budget_bytes: int, *, may_wait: bool = False
    ) -> StreamStop:
        """Sends the queued notes, and the records after the last note. Returns why the call
        stopped.

        Raises IndexError, and sends nothing, if a row is out of bounds.
        """
        frame = frame or self._nothing
        stop = self._native.baton_stream_send(
            *(self._stream, byref(frame.struct), len(frame.ids), budget_bytes),
            self._others if may_wait else -1,
        )
        if stop == StreamStop.BAD:
            raise IndexError("a frame names a record that is not there")
        return StreamStop(stop)

    def receive(
        self, frame: RecordFrame | None, budget_bytes: int, *, may_wait: bool = False
    ) -> tuple[StreamStop, int]:
        """Receives the records that follow the last note into their rows.

        Returns the reason why the call stopped, and the number of completely received records. The
        reason NOTE means that the frame has ended.
        """
        frame = frame or self._nothing
        stop = self._native.baton_stream_receive(
            *(self._stream, byref(frame.struct), len(frame.ids), budget_bytes),
            self._others if may_wait else -1,
            byref(self._received),
        )
        return StreamStop(stop), self._received.num_records

    @property
    def received_note(self) -> bytes:
        """The latest note that was received when `receive` returned NOTE."""
        return ctypes.string_at(self._received.note, self._received.note_bytes)

    def close(self) -> None:
        """Closes the connection. The stream must not be used afterwards."""
        self._native.baton_stream_close(self._stream)
        self._connection.close()


def _address(function: Any) -> int | None:
    return ctypes.cast(function, c_void_p).value
