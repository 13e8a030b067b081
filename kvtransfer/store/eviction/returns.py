"""Learns when blocks of a class are used again, and the worth of keeping them until then. Pure.

A block *returns* when it is used again. A class is a set of blocks that return after similar times.
For each class and each age since the last use, the table counts the blocks that returned and the
blocks that were given up. Together with the waiting blocks, these counts give the *hazard*: the
share of waiting blocks that return at each age (Kaplan and Meier, 1958). Ages are in half octaves,
so one table serves seconds and hours.

The worth of a block is the maximum of the expected hits per second, over all ages T until which it
may be kept:

    worth(age) = max over T > age of  P(returns before T) / E[time until it returns or T comes]

This is Gittins' index of the block. A block is worth little long before its likely return, after
it, or if blocks of its class seldom return. Hit density was first used for eviction by LHD.

Sources: Gittins, Bandit processes, JRSS B 1979; Beckmann, Chen and Cidon, LHD, NSDI 2018.
"""

import math
from collections import Counter
from collections.abc import Sequence

STEPS_PER_OCTAVE = 2
SHORTEST = 0.25  # upper bound of the first bucket of ages, in the unit of the class
NUM_BUCKETS = 44  # enough for ages up to 12 days if SHORTEST is 0.25 s
PRIOR_WEIGHT = 4.0  # number of blocks at which a class's counts weigh as much as its family's
PRIOR_HAZARD = 0.15  # assumed hazard of each bucket, under which worth falls with age as in LRU
MEMORY = 65_536.0  # number of events after which old counts weigh half
LEAST_EVENTS = 256  # minimum number of events between two computations of the worths


def bucket_of(age: float) -> int:
    """Returns the bucket of an age. Very large ages belong to the last bucket."""
    return min(NUM_BUCKETS - 1, int(STEPS_PER_OCTAVE * math.log2(1 + max(age, 0.0) / SHORTEST)))


def _edge(bucket: int) -> float:
    return SHORTEST * (math.pow(2.0, bucket / STEPS_PER_OCTAVE) - 1)


WIDTHS = [_edge(bucket + 1) - _edge(bucket) for bucket in range(NUM_BUCKETS)]


def worths(hazards: Sequence[float]) -> list[float]:
    """Returns the worth at each age for these hazards, in hits per unit of time."""
    found = []
    for start in range(NUM_BUCKETS):
        waiting, time, best = 1.0, 0.0, 0.0
        for hazard, width in zip(hazards[start:], WIDTHS[start:], strict=True):
            returned = waiting * hazard
            time += width * (waiting - returned / 2)
            waiting -= returned
            best = max(best, (1 - waiting) / time)
        found.append(best)
    return found


class ReturnTable:
    """Counts of returns by class and age, and the worths computed from the counts.

    `families` has the number of classes in each family. A class with few counts is assumed to be
    close to its family's average. `units` has the seconds per unit of age of each class.
    """

    def __init__(self, families: Sequence[int], units: Sequence[float]) -> None:
        assert sum(families) == len(units)
        self._families = families
        self._units = units
        self._returned = [[0.0] * NUM_BUCKETS for _ in units]
        self._given_up = [[0.0] * NUM_BUCKETS for _ in units]
        # number of waiting blocks by class and quarter of a second of the last use
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._num_events = 0
        flat = worths([PRIOR_HAZARD] * NUM_BUCKETS)
        self._worths = [[worth / unit for worth in flat] for unit in units]

    def worth(self, which: int, age_s: float) -> float:
        """Returns the expected hits per second of a block of that class and age."""
        return self._worths[which][bucket_of(age_s / self._units[which])]

    def wait(self, which: int, used_s: float, num_blocks: int = 1) -> None:
        """Counts `num_blocks` blocks of a class, last used at `used_s`, as waiting to return."""
        if num_blocks:
            self._waiting[which, _quarter(used_s)] += num_blocks

    def unwait(self, which: int, used_s: float) -> None:
        """Stops counting a block of that class, last used at `used_s`, as waiting to return."""
        cohort = (which, _quarter(used_s))
        self._waiting[cohort] -= 1
        if not self._waiting[cohort]:
            del self._waiting[cohort]

    def returned(self, which: int, used_s: float, now_s: float) -> None:
        """Counts the return of a waiting block."""
        self.unwait(which, used_s)
        self._returned[which][bucket_of((now_s - used_s) / self._units[which])] += 1
        self._count(now_s)

    def given_up(self, which: int, used_s: float, now_s: float) -> None:
        """Counts a waiting block as given up, because it is no longer observed."""
        self.unwait(which, used_s)
        self._given_up[which][bucket_of((now_s - used_s) / self._units[which])] += 1
        self._count(now_s)

    @property
    def num_waiting(self) -> int:
        """The number of waiting blocks of all classes."""
        return self._waiting.total()

    def _count(self, now_s: float) -> None:
        """Counts an event. Recomputes the worths rarely, so the cost per event stays small."""
        self._num_events += 1
        if self._num_events >= LEAST_EVENTS + 4 * len(self._waiting):
            self._learn(now_s)
            keep = MEMORY / (MEMORY + self._num_events)
            for counts in (*self._returned, *self._given_up):
                counts[:] = [count * keep for count in counts]
            self._num_events = 0

    def _learn(self, now_s: float) -> None:
        leaving = [counts.copy() for counts in self._given_up]
        for (which, quarter), num_blocks in self._waiting.items():
            leaving[which][bucket_of((now_s - quarter / 4) / self._units[which])] += num_blocks
        at_risk = [_at_risk(*each) for each in zip(self._returned, leaving, strict=True)]
        first = 0
        for size in self._families:
            family = range(first, first + size)
            first += size
            prior = [PRIOR_HAZARD] * NUM_BUCKETS
            totals = [
                [sum(t[c][b] for c in family) for b in range(NUM_BUCKETS)]
                for t in (self._returned, at_risk)
            ]
            prior = _hazards(totals[0], totals[1], prior)
            for which in family:
                if at_risk[which][0]:
                    hazards = _hazards(self._returned[which], at_risk[which], prior)
                    found = worths(hazards)
                    self._worths[which] = [worth / self._units[which] for worth in found]


def _quarter(used_s: float) -> int:
    return int(4 * used_s)


def _at_risk(returned: Sequence[float], leaving: Sequence[float]) -> list[float]:
    """Returns the number of blocks whose age reached each bucket."""
    total, found = 0.0, []
    for back, left in zip(reversed(returned), reversed(leaving), strict=True):
        total += back + left
        found.append(total)
    return found[::-1]


def _hazards(
    returned: Sequence[float], at_risk: Sequence[float], prior: Sequence[float]
) -> list[float]:
    return [
        min((back + PRIOR_WEIGHT * guess) / (risk + PRIOR_WEIGHT), 1.0)
        for back, risk, guess in zip(returned, at_risk, prior, strict=True)
    ]
