"""Counts how the requests of each version ended, so that a bad version can be given up.

Written by the requests' event loop and read by the same one, once a second.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_VERSIONS = 16  # the ones that ended requests last
LONGEST_FOR_S = 300.0  # the longest sequence is of the last one or two of these spans

CountHung = Callable[[float], Mapping[str, int]]  # by version, at a time in seconds


@dataclass(slots=True)
class VersionTally:
    """Requests of one version that ended in this process."""

    ended: int = 0
    failed: int = 0
    late: int = 0
    _longest: list[int] = field(default_factory=lambda: [0, 0])  # of the last span, and of this one
    _span: int = 0

    def longest_len(self, now_s: float) -> int:
        """The longest sequence lately, in tokens."""
        self._turn(now_s)
        return max(self._longest)

    def record_len(self, num_tokens: int, now_s: float) -> None:
        """Takes the length of a sequence that ended."""
        self._turn(now_s)
        self._longest[1] = max(self._longest[1], num_tokens)

    def _turn(self, now_s: float) -> None:
        span = int(now_s // LONGEST_FOR_S)
        if span != self._span:
            self._longest = [self._longest[1] if span == self._span + 1 else 0, 0]
            self._span = span


class Tallies:
    """The tallies of all versions, by name."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, VersionTally] = OrderedDict()
        self.hung: CountHung = lambda _: {}

    def of(self, name: str) -> VersionTally:
        """The tally of a version; zeros if none of its requests has ended."""
        return self._by_name.get(name) or VersionTally()

    def record(self, name: str, *, failed: bool, late: bool, num_tokens: int, now_s: float) -> None:
        """Takes the end of one answer."""
        tally = self._by_name.get(name)
        if tally is None:
            tally = self._by_name[name] = VersionTally()
        self._by_name.move_to_end(name)
        if len(self._by_name) > MAX_VERSIONS:
            self._by_name.popitem(last=False)
        tally.ended += 1
        tally.failed += failed
        tally.late += late
        tally.record_len(num_tokens, now_s)
