"""Predicted lengths of answers, from the answers that ended.

A client may bound the length of its answer; without a bound it is the whole context. Past answers
with a similar bound are a better guide. Memory is reserved for nearly the longest of them. The rest
of a running answer is predicted from past answers that were longer than it is now. Some kinds of
long answers are nearly complete, others have only begun.

Bounds are similar if they have the same number of binary digits.
"""

from bisect import bisect_right
from collections import deque
from itertools import accumulate

MEMORY = 256  # answers of each kind that are remembered
ENOUGH = 16  # with fewer, an answer is expected to reach its bound
NEARLY_ALL = 0.95  # the share of answers that the reserved memory is enough for
REFRESH_EVERY = 16  # answers; to sort them is not free


class AnswerLengths:
    """Lengths of answers, in tokens, by what they were allowed."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}

    def observe(self, max_tokens: int, num_tokens: int) -> None:
        """Learns that an answer with the bound `max_tokens` ended with `num_tokens`."""
        kind = self._kinds.get(max_tokens.bit_length())
        if kind is None:
            kind = self._kinds[max_tokens.bit_length()] = _Kind()
        kind.observe(num_tokens)

    def nearly_longest(self, max_tokens: int) -> int:
        """Tokens that nearly no answer like this exceeds."""
        known = self._known(max_tokens)
        if not known:
            return max_tokens
        return min(known[min(int(len(known) * NEARLY_ALL), len(known) - 1)], max_tokens)

    def mean(self, max_tokens: int) -> float:
        """Tokens of such an answer on average."""
        return self.left(max_tokens, 0)

    def left(self, max_tokens: int, so_far: int) -> float:
        """Mean number of tokens still to come of an answer that has `so_far`."""
        known = self._known(max_tokens)
        longer = len(known) - bisect_right(known, so_far)
        if not longer:
            return float(max(max_tokens - so_far, 1))
        total = self._kinds[max_tokens.bit_length()].sums[longer]
        return min(total / longer - so_far, float(max(max_tokens - so_far, 1)))

    def survival(self, max_tokens: int, so_far: int, more: float) -> float:
        """The share of answers with `so_far` tokens that go on after `more` further ones."""
        if so_far + more >= max_tokens:
            return 0.0
        known = self._known(max_tokens)
        longer = len(known) - bisect_right(known, so_far)
        if not longer:
            return 1.0
        return (len(known) - bisect_right(known, so_far + more)) / longer

    def _known(self, max_tokens: int) -> list[int]:
        kind = self._kinds.get(max_tokens.bit_length())
        return [] if kind is None else kind.ordered


class _Kind:
    def __init__(self) -> None:
        self.ordered: list[int] = []  # empty while there are not ENOUGH
        self.sums: list[int] = []  # at n: the sum of the n longest
        self._latest: deque[int] = deque(maxlen=MEMORY)
        self._num_new = 0

    def observe(self, num_tokens: int) -> None:
        self._latest.append(num_tokens)
        self._num_new += 1
        if len(self._latest) >= ENOUGH and (self._num_new >= REFRESH_EVERY or not self.ordered):
            self._num_new = 0
            self.ordered = sorted(self._latest)
            self.sums = list(accumulate(reversed(self.ordered), initial=0))
