"""Sealed streams: messages over a connection, encrypted and authenticated with AEGIS.

C++ does the work (`src/stream.h`): records are sealed from where they lie into the caches, and sent
from there; they are received into the caches, and opened to where they belong. AEGIS-128L (RFC
10032) is libsodium's, which ZeroMQ uses for CURVE and brings along. It seals 15 GiB/s where AES-GCM
of OpenSSL 3.0 seals 4. Where both ends compute as many *lanes* at once, streams are sealed with
AEGIS-128X2 or AEGIS-128X4 (`src/aegis.h`), which is two to three times as fast.

A stream has a key of its own. Both directions number their messages, and the number is the nonce.
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
from kvtransfer.native.structs import Cipher, Received, Records, records_struct

KEY_BYTES = 16
_NO_RECORDS = np.empty((0, 1), np.uint8)


class CannotSeal(BatonError):
    """There is no libsodium with AEGIS-128L here, or no AES in the processor."""


class StreamStop(IntEnum):
    """Why a call returned; mirrors `Stop` in stream.h."""

    BLOCKED = 0  # until the connection is ready
    DONE = 1  # all is sent
    MORE = 2  # the budget is used up
    NOTE = 3  # a note has come
    LOST = 4  # the connection
    BAD = 5  # what came is not the peer's next message


class RecordFrame(NamedTuple):
    """Records that follow a note: these rows of an array. A negative id stands for no row."""

    records: Blocks
    ids: "array[int]"
    struct: Records

    @classmethod
    def of(cls, records: Blocks, ids: Sequence[int]) -> "RecordFrame":
        """Returns the frame of these rows of `records` [n, record_bytes], contiguous each."""
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
        except (OSError, AttributeError):  # not there, or older than 1.0.19
            continue
    return None


@cache
def _wide_cipher() -> tuple[int, Cipher]:
    """Returns how many lanes C++ computes at once, and their cipher; 1 if it computes none."""
    cipher = Cipher()
    return library().baton_wide_cipher(byref(cipher)), cipher


def agreed_lanes(lanes_of_peer: int | None = None) -> int:
    """Returns in how many lanes to seal for a peer; without one, in how many at best."""
    lanes, _ = _wide_cipher()
    return lanes if lanes_of_peer in (lanes, None) else 1


def _places_of_libsodium() -> Iterator[str]:
    """Yields the library that came with pyzmq, and the system's."""
    brought = Path(zmq.__file__).parents[1] / "pyzmq.libs"
    yield from map(str, brought.glob("libsodium*"))
    system = ctypes.util.find_library("sodium")
    if system is not None:
        yield system


def can_seal() -> bool:
    """True if streams can be sealed here."""
    return _cipher() is not None


class SealedStream:
    """One end of a stream, over a connection that does not block. One thread at a time uses it."""

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

        Where it may wait it does so for a few milliseconds, within a frame, unless anything else
        is ready at the descriptor `others`, an epoll's. The peer agrees to the number of `lanes`.
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
        """The connection's descriptor."""
        return self._connection.fileno()

    def note(self, note: bytes) -> bool:
        """Queues a note, which `send` sends, and begins a frame. Returns False without room."""
        return bool(self._native.baton_stream_note(self._stream, note, len(note)))

    def send(
        self, frame: RecordFrame | None, budget_bytes: int, *, may_wait: bool = False
    ) -> StreamStop:
        """Goes on with the records that follow the last note.

        Raises IndexError if a row is out of bounds; nothing is sent then.
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

        Returns also how many of them are complete. After NOTE the frame is over.
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
        """The note after which `receive` returned."""
        return ctypes.string_at(self._received.note, self._received.note_bytes)

    def close(self) -> None:
        """Closes the connection. It is not used afterwards."""
        self._native.baton_stream_close(self._stream)
        self._connection.close()


def _address(function: Any) -> int | None:
    return ctypes.cast(function, c_void_p).value
