"""The C++ functions in Python: structures, signatures, and the loaded library.

Structures mirror those of src/text.cpp, field by field.
"""

import ctypes
import logging
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from pathlib import Path

from engine.errors import BuildError
from engine.native_build import Sources, built_library, open_library

log = logging.getLogger(__name__)

SOURCES = Sources("text", Path(__file__).parent / "src", "text.cpp")


class NativeSeries(Structure):
    """One series of a histogram; the arrays are Python's."""

    _fields_ = (
        ("bounds", c_void_p),
        ("num_bounds", c_int64),
        ("counts", c_void_p),
        ("sum", c_void_p),
    )


class NativeText(Structure):
    """The state of one answer's text, as `router.text.detokenizer.TextState`, and its chunks."""

    _fields_ = (
        ("vocabulary", c_void_p),
        ("before", c_char_p),
        ("before_len", c_int64),
        ("after", c_char_p),
        ("after_len", c_int64),
        ("end_ids", c_void_p),
        ("num_end_ids", c_int64),
        ("min_tokens", c_int64),
        ("gaps", c_void_p),
        ("num_tokens", c_int64),
        ("num_batched", c_int64),
        ("last_s", c_double),
        ("shows_special", c_int32),
        ("rest_len", c_int32),
        ("rest_bytes", c_uint8 * 4),
    )

    @property
    def rest(self) -> bytes:
        """The begin of an incomplete character."""
        return bytes(self.rest_bytes[: self.rest_len]) if self.rest_len else b""

    @rest.setter
    def rest(self, data: bytes) -> None:
        self.rest_len = len(data)
        self.rest_bytes[: len(data)] = tuple(data)


class TakenFrame(Structure):
    """What was done with a worker's frame."""

    _fields_ = (
        ("num_messages", c_int64),
        ("num_taken", c_int64),
        ("num_tokens", c_int64),
        ("taken", POINTER(c_void_p)),  # by message; None: not taken
        ("num_rests", c_int64),
        ("rests", POINTER(c_int64)),
        ("out", c_void_p),
        ("unknown_id", c_int64),
        ("unknown_vocabulary", c_void_p),
    )


Core = ctypes.PyDLL

SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "baton_vocabulary_open": (c_void_p, (c_int64,)),
    "baton_vocabulary_close": (None, (c_void_p,)),
    "baton_vocabulary_put": (None, (c_void_p, c_int64, c_char_p, c_int64, c_int32)),
    "baton_text_open": (c_void_p, ()),
    "baton_text_close": (None, (c_void_p,)),
    "baton_text_step": (
        c_int64,
        (*[c_void_p] * 4, c_int64, *[c_void_p] * 3, POINTER(c_int64), POINTER(c_void_p)),
    ),
    "baton_lane_open": (c_int32, (c_void_p, c_char_p, c_int64, c_void_p, c_int32, c_int64)),
    "baton_lane_close": (None, (c_void_p, c_char_p, c_int64)),
    "baton_text_frame": (c_int32, (c_void_p, c_char_p, c_int64, c_double, POINTER(TakenFrame))),
}


@cache
def core() -> Core | None:
    """The library for this machine, built if need be; None, with a warning, where it cannot be."""
    try:
        return open_library(built_library(SOURCES), SIGNATURES, Core)
    except (BuildError, OSError) as error:
        log.warning("tokens become text in Python, one by one, there is no C++: %s", error)
        return None


def opened() -> Core:
    """The library. Raises BuildError where there is none."""
    library = core()
    if library is None:
        raise BuildError("the C++ of texts is not available")
    return library


def is_native() -> bool:
    """True if there is a library. The first call builds it."""
    return core() is not None
