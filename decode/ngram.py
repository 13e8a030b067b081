"""Proposals without a model: the tokens that followed the same tokens before.

The search takes the last 4, 3 or 2 tokens of a sequence, and finds the longest such run that has
occurred before. The tokens that followed it there are the proposal. If the proposal reaches the end
of the sequence, it goes on with its own first tokens, as if the sequence were periodic.

C++ searches its own copy of each sequence's tokens. Each lookup appends the new tokens to the copy.
One call searches a whole batch.

Sources: prompt lookup decoding, Saxena, 2023; copying with overlap, Ziv and Lempel, 1977.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.native.library import Native, library

SIZES = (4, 3, 2)  # tokens, longest first
LONGER = (16, 8)  # lengths reported for matches beyond the longest size


class Match(NamedTuple):
    """The sequence ends with `length` tokens that also end before `start`."""

    start: int
    length: int  # one of SIZES or LONGER; it may be more


class _Tokens:
    def __init__(self, library: Native, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_known = 0  # number of tokens that the C++ copy has
        self.handle: int = library.baton_ngrams_open()
        self._close = library.baton_ngrams_close

    def __del__(self) -> None:
        self._close(self.handle)


class Ngrams:
    """Keeps copies of sequences and searches them for matches."""

    def __init__(self) -> None:
        """Raises BuildError."""
        self._library = library()

    def open(self, token_ids: list[int]) -> _Tokens:
        """Adds a sequence. Its later tokens are appended to the same list by the caller."""
        return _Tokens(self._library, token_ids)

    def find(self, sequences: Sequence[_Tokens]) -> list[Match | None]:
        """Returns the match of each sequence, or None. All were opened with `open`."""
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
    """Returns the tokens after a match, as if the sequence repeated them."""
    found = list(token_ids[match.start : match.start + num_tokens])
    for i in range(num_tokens - len(found)):
        found.append(found[i])
    return found
