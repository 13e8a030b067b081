"""Boxes of records, encrypted and authenticated with AES-256-GCM.

libcrypto of OpenSSL does the work, called from C++: blocks are encrypted from where they lie, and
decrypted to where they belong. Python's own `ssl` uses the same library on most systems.

A key has one sealer. Boxes are numbered by it, and a number is never used twice, since it is the
nonce. A box that was changed, or comes under another number, does not open.
"""

import ctypes
import ctypes.util
from array import array
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_void_p
from functools import cache
from typing import Any

import numpy as np

from engine.errors import BatonError
from kvtransfer.memory import Blocks
from kvtransfer.native.copying import piece_table
from kvtransfer.native.library import Cipher, kernels, records_struct
from kvtransfer.records import RecordPiece

KEY_BYTES = 32
TAG_BYTES = 16


class CannotSeal(BatonError):
    """There is no C++ or no libcrypto here, or it failed."""


@cache
def _libcrypto() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("crypto")
    if name is None:
        return None
    try:
        library = ctypes.CDLL(name)
        library.EVP_CIPHER_CTX_new.restype = c_void_p
        library.EVP_CIPHER_CTX_free.argtypes = (c_void_p,)
        library.EVP_aes_256_gcm.restype = c_void_p
        init = library.EVP_CipherInit_ex
        init.argtypes = (c_void_p, c_void_p, c_void_p, c_char_p, c_char_p, c_int)
        _ = library.EVP_CipherUpdate, library.EVP_CipherFinal_ex, library.EVP_CIPHER_CTX_ctrl
    except (OSError, AttributeError):
        return None
    return library


def can_seal() -> bool:
    """True if boxes can be sealed and opened here."""
    return kernels() is not None and _libcrypto() is not None


class _Boxes:
    """A key, and the functions that use it."""

    def __init__(self, key: bytes, *, encrypts: bool) -> None:
        """Raises CannotSeal."""
        assert len(key) == KEY_BYTES
        native, crypto = kernels(), _libcrypto()
        if native is None or crypto is None:
            raise CannotSeal("no C++ or no libcrypto")
        self._native = native
        self._free = crypto.EVP_CIPHER_CTX_free
        self._context = crypto.EVP_CIPHER_CTX_new()
        gcm = crypto.EVP_aes_256_gcm()
        if crypto.EVP_CipherInit_ex(self._context, gcm, None, key, bytes(12), int(encrypts)) != 1:
            raise CannotSeal("libcrypto refuses AES-256-GCM")
        self._cipher = byref(
            Cipher(
                _address(crypto.EVP_CipherInit_ex),
                _address(crypto.EVP_CipherUpdate),
                _address(crypto.EVP_CipherFinal_ex),
                _address(crypto.EVP_CIPHER_CTX_ctrl),
                self._context,
            )
        )

    def close(self) -> None:
        """Forgets the key."""
        self._free(self._context)


class Sealer(_Boxes):
    """Seals boxes. No two may have the same number."""

    def __init__(self, key: bytes) -> None:
        """Raises CannotSeal."""
        super().__init__(key, encrypts=True)

    def seal(self, number: int, text: bytes, out: Blocks) -> None:
        """Seals `text` into `out`, which is longer by the tag. Raises CannotSeal."""
        assert len(out) == len(text) + TAG_BYTES
        _check(
            self._native.baton_seal_bytes(*(self._cipher, number, text, len(text), out.ctypes.data))
        )

    def seal_records(
        self,
        number: int,
        frame: Blocks,
        tag: Blocks,
        source: Blocks,
        ids: Sequence[int],
        pieces: Sequence[RecordPiece],
    ) -> None:
        """Seals the pieces of each record `ids[i]` of the source as record i of the frame.

        Raises CannotSeal.
        """
        numbers, table = array("q", ids), piece_table(pieces)
        _check(
            self._native.baton_seal_records(
                *(self._cipher, number),
                byref(records_struct(frame)),
                byref(records_struct(source, numbers.buffer_info()[0])),
                *(len(numbers), table.buffer_info()[0], len(pieces), tag.ctypes.data),
            )
        )


class Opener(_Boxes):
    """Opens the boxes of a Sealer with the same key."""

    def __init__(self, key: bytes) -> None:
        """Raises CannotSeal."""
        super().__init__(key, encrypts=False)

    def open(self, number: int, box: Blocks) -> bytes | None:
        """Returns the contents of a box, or None if it was changed."""
        assert len(box) >= TAG_BYTES
        out = np.empty(len(box) - TAG_BYTES, np.uint8)
        opened = self._native.baton_open_bytes(
            *(self._cipher, number, box.ctypes.data, len(out), out.ctypes.data)
        )
        return out.tobytes() if opened else None

    def open_records(
        self,
        number: int,
        frame: Blocks,
        tag: Blocks,
        sink: Blocks,
        places: Sequence[int],
        pieces: Sequence[RecordPiece],
    ) -> bool:
        """Opens record i of the frame into the record `places[i]` of the sink.

        A record whose place is negative is opened where it lies. Returns False if the box was
        changed, which is known only after everything is written.
        """
        numbers, table = array("q", places), piece_table(pieces)
        return bool(
            self._native.baton_open_records(
                *(self._cipher, number),
                byref(records_struct(sink, numbers.buffer_info()[0])),
                byref(records_struct(frame)),
                *(len(numbers), table.buffer_info()[0], len(pieces), tag.ctypes.data),
            )
        )


def _address(function: Any) -> int | None:
    return ctypes.cast(function, c_void_p).value


def _check(done: int) -> None:
    if not done:
        raise CannotSeal("libcrypto failed, or a record is out of bounds")
