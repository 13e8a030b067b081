"""`decode.ngram` in C++: one call looks at a whole batch.

Each index in C++ has a copy of its sequence's tokens, which is brought up to date with each look.
"""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from functools import cache
from pathlib import Path

from decode.ngram import Match, Ngrams, PythonNgrams
from engine.errors import BuildError
from engine.native_build import Sources, built_library, open_library

log = logging.getLogger(__name__)

SOURCES = Sources("ngrams", Path(__file__).parent / "src", "ngrams.cpp")
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "baton_ngrams_open": (c_void_p, ()),
    "baton_ngrams_close": (None, (c_void_p,)),
    "baton_ngrams_look": (
        None,
        (c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p),
    ),
}


@cache
def best_ngrams() -> Ngrams:
    """Those in C++, built if need be; those in Python, with a warning, if they cannot be built."""
    try:
        return NativeNgrams(open_library(built_library(SOURCES), SIGNATURES, ctypes.PyDLL))
    except (BuildError, OSError) as error:
        log.warning("n-grams are looked for in Python, there is no C++: %s", error)
        return PythonNgrams()


class _NativeIndex:
    def __init__(self, library: ctypes.CDLL, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_known = 0  # of these, in C++
        self.handle: int = library.baton_ngrams_open()
        self._close = library.baton_ngrams_close

    def __del__(self) -> None:
        self._close(self.handle)


class NativeNgrams:
    """`Ngrams` in C++."""

    indexed_tokens = 1024

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def open(self, token_ids: list[int]) -> _NativeIndex:
        """Begins to follow a sequence's tokens."""
        return _NativeIndex(self._library, token_ids)

    def look(
        self, indexes: Sequence[_NativeIndex], budget_tokens: int, own_tokens: int
    ) -> list[Match | None]:
        """Indexes more tokens and returns the match of each."""
        tokens, counts = array("i"), array("i")
        for index in indexes:
            new = index.token_ids[index.num_known :]
            index.num_known += len(new)
            counts.append(len(new))
            tokens.fromlist(new)
        num = len(indexes)
        handles = array("Q", [index.handle for index in indexes])
        starts, lengths = array("i", bytes(4 * num)), array("i", bytes(4 * num))
        self._library.baton_ngrams_look(
            _address(handles),
            num,
            _address(counts),
            _address(tokens),
            budget_tokens,
            own_tokens,
            _address(starts),
            _address(lengths),
        )
        return [
            Match(start, length) if length else None
            for start, length in zip(starts, lengths, strict=True)
        ]


def _address(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
