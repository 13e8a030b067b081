"""Proposals without a model: the tokens that followed the same tokens before.

An index of one sequence's prompt and answer maps each run of 4, 3 and 2 tokens to the place behind
its most recent occurrence. The longest run that ends the sequence and has occurred before proposes
the tokens that followed it. At the end of the sequence it continues from its own proposal, as a
period does.

Each token costs three stores in dicts, once. A long prompt is indexed over several looks, from its
beginning. The index takes some 300 bytes a token.

`decode.native.ngrams` finds the same in C++, without an index.

Sources: prompt lookup decoding, Saxena, 2023; copying with overlap, Ziv and Lempel, 1977.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

SIZES = (4, 3, 2)  # tokens, longest first
LONGER = (16, 8)  # lengths reported for matches beyond the longest size
BUDGET_TOKENS = 256  # that one look indexes, of all sequences in order; but in any case
OWN_TOKENS = 32  # of each, so that an answer is indexed even if others have long prompts

# A key is a run's ids in one integer. Each id is plus one, so that zero means no token.
_BITS = 33
_MASKS = tuple((1 << _BITS * size) - 1 for size in SIZES)


class Match(NamedTuple):
    """The sequence ends with `length` tokens that also end before `start`."""

    start: int
    length: int  # one of SIZES or LONGER; it may be more


class NgramIndex:
    """The index of one sequence. It follows the sequence's list of tokens as that grows."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._num_indexed = 0  # tokens that end an indexed run
        self._key = 0  # of the longest run that ends with the last of them
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)

    @property
    def num_missing(self) -> int:
        """Tokens that are not indexed yet."""
        return len(self._token_ids) - 1 - self._num_indexed

    def index(self, max_tokens: int) -> int:
        """Indexes up to `max_tokens` more tokens; returns how many those were.

        The last token stays out: it ends the run that is searched for.
        """
        token_ids, key, mask = self._token_ids, self._key, _MASKS[0]
        fours, threes, twos = self._places
        _, mask_of_three, mask_of_two = _MASKS
        start = self._num_indexed
        end = max(start, min(start + max_tokens, len(token_ids) - 1))
        for place, token in enumerate(token_ids[start:end], start + 1):
            key = (key << _BITS | (token + 1)) & mask
            fours[key] = place
            threes[key & mask_of_three] = place
            twos[key & mask_of_two] = place
        self._key, self._num_indexed = key, end
        return end - start

    def find(self) -> Match | None:
        """Returns the most recent indexed occurrence of the longest run at the end."""
        if self.num_missing == 0:
            key = self._key << _BITS | (self._token_ids[-1] + 1)
        else:
            key = 0
            for token in self._token_ids[-SIZES[0] :]:
                key = key << _BITS | (token + 1)
        for size, mask, places in zip(SIZES, _MASKS, self._places, strict=True):
            start = places.get(key & mask)
            if start is not None:
                return Match(start, self._length(start) if size == SIZES[0] else size)
        return None

    def _length(self, start: int) -> int:
        for length in LONGER:
            before = self._token_ids[max(start - length, 0) : start]
            if len(before) == length and before == self._token_ids[-length:]:
                return length
        return SIZES[0]


class Ngrams(Protocol):
    """Follows sequences and looks for matches in them."""

    def open(self, token_ids: list[int]) -> Any:
        """Begins to follow a sequence whose tokens are, and will be, in this list."""
        ...

    def look(self, sequences: Sequence[Any]) -> list[Match | None]:
        """Returns the match of each sequence that was opened here."""
        ...


class PythonNgrams(Ngrams):
    """Those of this module."""

    def __init__(self, budget_tokens: int = BUDGET_TOKENS) -> None:
        self._budget_tokens = budget_tokens

    def open(self, token_ids: list[int]) -> NgramIndex:
        """Returns an empty index."""
        return NgramIndex(token_ids)

    def look(self, sequences: Sequence[NgramIndex]) -> list[Match | None]:
        """Looks at one index after the other."""
        matches, budget_tokens = [], self._budget_tokens
        for index in sequences:
            budget_tokens -= index.index(max(budget_tokens, OWN_TOKENS))
            matches.append(index.find())
        return matches


def follow(token_ids: Sequence[int], match: Match, num_tokens: int) -> list[int]:
    """Returns the tokens after a match, as if the sequence repeated them."""
    found = list(token_ids[match.start : match.start + num_tokens])
    for i in range(num_tokens - len(found)):
        found.append(found[i])
    return found
