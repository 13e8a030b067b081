"""`decode.ngram` in C++: one call looks at a whole batch.

C++ searches its own copy of each sequence's tokens, which each look brings up to date.
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
        (c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
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


class _NativeTokens:
    def __init__(self, library: ctypes.CDLL, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_known = 0  # of these, in C++
        self.handle: int = library.baton_ngrams_open()
        self._close = library.baton_ngrams_close

    def __del__(self) -> None:
        self._close(self.handle)


class NativeNgrams:
    """`Ngrams` in C++."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def open(self, token_ids: list[int]) -> _NativeTokens:
        """Begins to follow a sequence's tokens."""
        return _NativeTokens(self._library, token_ids)

    def look(self, sequences: Sequence[_NativeTokens]) -> list[Match | None]:
        """Searches the tokens of each."""
        tokens, counts = array("i"), array("i")
        for sequence in sequences:
            new = sequence.token_ids[sequence.num_known :]
            sequence.num_known += len(new)
            counts.append(len(new))
            tokens.fromlist(new)
        num = len(sequences)
        handles = array("Q", [sequence.handle for sequence in sequences])
        starts, lengths = array("i", bytes(4 * num)), array("i", bytes(4 * num))
        self._library.baton_ngrams_look(
            _address(handles),
            num,
            _address(counts),
            _address(tokens),
            _address(starts),
            _address(lengths),
        )
        return [
            Match(start, length) if length else None
            for start, length in zip(starts, lengths, strict=True)
        ]


def _address(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
