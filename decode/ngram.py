"""What followed the same tokens before: proposals without a model.

An index of one sequence's prompt and answer maps each run of 4, 3 and 2 tokens to the place behind
its most recent occurrence. The longest run that ends the sequence and has occurred before proposes
what followed it; where that reaches the end of the sequence, it goes on from its own proposal, as a
period does.

Each token costs three stores in dicts, once. A long prompt is indexed bit by bit, over several
steps, from its beginning. The index takes some 300 bytes a token.

Sources: prompt lookup decoding, Saxena, 2023; copying with overlap, Ziv and Lempel, 1977.
"""

from typing import NamedTuple

SIZES = (4, 3, 2)  # tokens, longest first
LONGER = (16, 8)  # a match is told to be so long, if it is, beyond the longest size

# A key is a run's ids in one integer, each plus one, so that nothing equals a token not there yet.
_BITS = 33
_MASKS = tuple((1 << _BITS * size) - 1 for size in SIZES)


class Match(NamedTuple):
    """The sequence ends with `length` tokens that also end before `start`."""

    start: int
    length: int  # one of SIZES or LONGER; it may be more


class NgramIndex:
    """Of one sequence, whose list of tokens it follows as that grows."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._num_indexed = 0  # tokens that end a run which can be found
        self._key = 0  # of the longest run that ends with them
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)

    @property
    def num_missing(self) -> int:
        """Tokens that `index` has still to take in."""
        return len(self._token_ids) - 1 - self._num_indexed

    def index(self, max_tokens: int) -> int:
        """Takes in so many more tokens; returns how many those were.

        The last token of the sequence ends the run that is looked for: it stays out.
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
        """The most recent occurrence, among what is indexed, of the longest run at the end."""
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

    def follow(self, match: Match, num_tokens: int) -> list[int]:
        """What followed a match, as if the sequence went on like that."""
        found = self._token_ids[match.start : match.start + num_tokens]
        for i in range(num_tokens - len(found)):
            found.append(found[i])
        return found

    def _length(self, start: int) -> int:
        for length in LONGER:
            before = self._token_ids[max(start - length, 0) : start]
            if len(before) == length and before == self._token_ids[-length:]:
                return length
        return SIZES[0]
