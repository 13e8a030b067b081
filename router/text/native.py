"""Structures of `src/text/text.cpp`, with the same fields. In C++, they handle answers' tokens.

C++ does the work of `router.text.detokenizer` and `router.gateway.answers.stream` for many answers
at once. It decodes tokens, escapes the text for JSON, and adds the constant parts of a chunk. In
tests these two modules are the slow twin. Only the bytes of each token are used, so C++ supports
only ByteLevel tokenizers. `router.gateway.answers.batching` makes the calls.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p
from itertools import accumulate
from typing import Protocol

from engine.native.library import library


class GapSeries(Protocol):
    """The interface of a series of a histogram. The addresses of its arrays never change."""

    @property
    def bounds(self) -> "array[float]":
        """Upper bounds of all buckets except the last, which has none."""
        ...

    @property
    def counts(self) -> "array[int]":
        """The number of observed values in each bucket."""
        ...

    @property
    def total(self) -> "array[float]":
        """The sum of all observed values, in an array."""
        ...


class NativeVocabulary:
    """The bytes of each token of one tokenizer, in C++."""

    def __init__(
        self, bytes_by_id: Mapping[int, bytes], size: int, special: frozenset[int]
    ) -> None:
        """Creates a vocabulary for ids below `size`. Raises BuildError."""
        self._library = library()
        tokens = [bytes_by_id.get(token_id, b"") for token_id in range(size)]
        ends = array("q", accumulate(map(len, tokens)))
        is_special = bytes(token_id in special for token_id in range(size))
        self.handle: int = self._library.baton_vocabulary_open(
            b"".join(tokens), ends.buffer_info()[0], is_special, size
        )

    def __del__(self) -> None:
        self._library.baton_vocabulary_close(self.handle)


class NativeSeries(Structure):
    """A series of a histogram in arrays of Python, for C++."""

    _fields_ = (
        ("bounds", c_void_p),
        ("num_bounds", c_int64),
        ("counts", c_void_p),
        ("sum", c_void_p),
    )


class NativeText(Structure):
    """The state of one answer's text (`router.text.detokenizer.TextState`), and of its chunks."""

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

    def describe(
        self,
        vocabulary: NativeVocabulary,
        *,
        end_ids: Sequence[int],
        min_tokens: int,
        gaps: GapSeries,
        shows_special: bool,
    ) -> None:
        """Sets how C++ converts tokens to text.

        Tokens of `end_ids` are not shown after `min_tokens` tokens. The seconds between two steps
        are counted in `gaps`.
        """
        ends = array("q", end_ids)
        series = NativeSeries(
            gaps.bounds.buffer_info()[0],
            len(gaps.bounds),
            gaps.counts.buffer_info()[0],
            gaps.total.buffer_info()[0],
        )
        self._kept = (vocabulary, ends, gaps, series)  # keeps the memory that C++ reads
        self.vocabulary = vocabulary.handle
        self.end_ids, self.num_end_ids = ends.buffer_info()
        self.min_tokens = min_tokens
        self.gaps = ctypes.addressof(series)
        self.shows_special = shows_special

    def surround(self, before: bytes, after: bytes) -> None:
        """Sets the bytes before and after the text of each chunk. The text is a JSON string."""
        self.before, self.after = before, after  # ctypes keeps these bytes alive
        self.before_len, self.after_len = len(before), len(after)


class TakenFrame(Structure):
    """The result of handling a worker's frame in C++."""

    _fields_ = (
        ("num_messages", c_int64),
        ("num_taken", c_int64),
        ("num_tokens", c_int64),
        ("taken", POINTER(c_void_p)),  # for each message, its answer; None: not handled
        ("num_rests", c_int64),
        ("rests", POINTER(c_int64)),
        ("out", c_void_p),
    )
