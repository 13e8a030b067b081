"""Structures of `src/text/text.cpp`, field by field."""

from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p


class NativeSeries(Structure):
    """One series of a histogram; the arrays are Python's."""

    _fields_ = (
        ("bounds", c_void_p),
        ("num_bounds", c_int64),
        ("counts", c_void_p),
        ("sum", c_void_p),
    )


class NativeText(Structure):
    """The state of one answer's text, as in `router.text.detokenizer.TextState`, and its chunks."""

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
        """The first bytes of an incomplete character."""
        return bytes(self.rest_bytes[: self.rest_len]) if self.rest_len else b""

    @rest.setter
    def rest(self, data: bytes) -> None:
        self.rest_len = len(data)
        self.rest_bytes[: len(data)] = tuple(data)


class TakenFrame(Structure):
    """The result of handling a worker's frame."""

    _fields_ = (
        ("num_messages", c_int64),
        ("num_taken", c_int64),
        ("num_tokens", c_int64),
        ("taken", POINTER(c_void_p)),  # by message; None: not handled
        ("num_rests", c_int64),
        ("rests", POINTER(c_int64)),
        ("out", c_void_p),
        ("unknown_id", c_int64),
        ("unknown_vocabulary", c_void_p),
    )
