"""Proposes drafts without a model: the tokens that followed the same tokens earlier.

The search finds an earlier occurrence of the last four tokens of a sequence, or else of the last
three or two. The tokens that followed this occurrence are the proposal. If the proposal reaches the
end of the sequence, the proposal's own first tokens follow: the sequence is assumed to be periodic.

C++ searches its own copy of each sequence's tokens. Each lookup appends the new tokens to the copy.
One call searches a whole batch.

Sources: prompt lookup decoding, Saxena, 2023; copying with overlap, Ziv and Lempel, 1977.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.native.library import Native, library

SIZES = (4, 3, 2)  # numbers of tokens to search for, longest first
LONGER = (16, 8)  # match lengths that are reported if a match is longer than four tokens


class Match(NamedTuple):
    """An earlier occurrence of the last `length` tokens of a sequence, which ends before
    `start`.
    """

    start: int
    length: int  # one of SIZES or LONGER; the actual match may be longer


class _Tokens:
    def __init__(self, library: Native, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_known = 0  # number of tokens in the C++ copy
        self.handle: int = library.baton_ngrams_open()
        self._close = library.baton_ngrams_close

    def __del__(self) -> None:
        self._close(self.handle)


class Ngrams:
    """Keeps C++ copies of sequences, and searches the copies for matches."""

    def __init__(self) -> None:
        """Loads the C++ library. Raises BuildError."""
        self._library = library()

    def open(self, token_ids: list[int]) -> _Tokens:
        """Adds a sequence. The caller appends its later tokens to the same list."""
        return _Tokens(self._library, token_ids)

    def find(self, sequences: Sequence[_Tokens]) -> list[Match | None]:
        """Returns the match of each sequence, or None. The sequences were returned by `open`."""
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


def follow(token_ids: Sequence[int], match: Match, num_tokens: int) -> list[int]:
    """Returns the tokens after a match, assuming that the sequence repeats them."""
    found = list(token_ids[match.start : match.start + num_tokens])
    for i in range(num_tokens - len(found)):
        found.append(found[i])
    return found
