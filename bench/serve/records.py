"""Writes one CSV row per request of a load, and searches for the highest rate within bounds. Pure.

In a row, times are seconds from the start of the run, and latencies are milliseconds. If a request
lacks a latency, the cell is empty.

The search finds the highest rate at which enough requests meet their bounds.

1. The rate doubles (or halves) until one rate passes and a higher one fails.
2. The interval is bisected on a log scale, until the failing rate is within `precision` of the
   passing rate.

In a trial, k of n requests are within the bounds. It passes if Wilson's 95 % interval of the share
lies above the goal, and fails if it lies below. Otherwise the same rate is tried again, and the
requests of both trials are added. After `MOST_TRIALS` trials the share is compared with the goal
without an interval, and the rate is marked as unsure.

Requests of one trial wait in the same queues, so they are not independent, and the true interval is
wider than Wilson's (E. B. Wilson, JASA 22, 1927). Longer trials compensate for this.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client.answers import Answer
from bench.client.load import LoadRun, RequestOutcome, SloBounds, meets

COLUMNS = (
    "run",
    "session",
    "turn",
    "due_s",
    "send_lag_ms",
    "slot_wait_ms",
    "ttft_ms",
    "ttft_due_ms",
    "tpot_ms",
    "e2e_ms",
    "e2e_due_ms",
    "longest_gap_ms",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "within_slo",
    "error",
)


def csv_of(runs: Sequence[LoadRun], slo: SloBounds | None) -> str:
    """Returns a CSV of all requests, in order of run and due time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, run in enumerate(runs):
        for one in run.outcomes:
            writer.writerow([number, *_cells(one, slo)])
    return text.getvalue()


def _cells(one: RequestOutcome, slo: SloBounds | None) -> list[object]:
    begin = [one.session, one.turn, f"{one.due_s:.6f}", _ms(one.send_lag_s), _ms(one.slot_wait_s)]
    result = one.result
    if not isinstance(result, Answer):
        return [*begin, *[""] * 9, *(["no"] if slo else [""]), result.kind]
    return [
        *begin,
        _ms(result.ttft_s),
        _ms(result.ttft_s + one.delay_s),
        _ms(result.tpot_s),
        _ms(result.e2e_s),
        _ms(result.e2e_s + one.delay_s),
        _ms(max(result.gaps_s, default=None)),
        _text(result.num_prompt_tokens),
        _text(result.num_cached_tokens),
        result.num_output_tokens,
        "" if slo is None else ("yes" if meets(result, slo, delay_s=one.delay_s) else "no"),
        "",
    ]


def _ms(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s * 1e3:.3f}"


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


Z_95 = 1.96
MOST_TRIALS = 3
MOST_DOUBLINGS = 12
MOST_HALVINGS = 4  # most halvings of the first rate: a trial at half the rate takes twice as long


@dataclass(frozen=True, slots=True)
class SweepGoal:
    """The share of requests that must meet the bounds, and the precision of the found rate."""

    attainment: float = 0.9
    precision: float = 0.1


HIGHEST = "sweep/highest_rate"
SHARE_AT = "sweep/attainment_at_"  # start of a result's name; the rate follows
GOAL = "attainment"  # name of the goal in the settings of a report


@dataclass(frozen=True, slots=True)
class SweepStep:
    """All trials of one rate, and their result."""

    rate_per_s: float
    num_met: int
    num_sent: int
    num_trials: int
    passed: bool | None  # None: another trial is needed
    is_sure: bool

    @property
    def share(self) -> float:
        """Returns the share of requests within the bounds."""
        return self.num_met / self.num_sent if self.num_sent else 0.0


def wilson(num_met: int, num_sent: int, z: float = Z_95) -> tuple[float, float]:
    """Returns Wilson's interval of a share; 0 … 1 if there are no requests."""
    if num_sent == 0:
        return 0.0, 1.0
    share, square = num_met / num_sent, z * z / num_sent
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / num_sent + square / (4 * num_sent)) / (1 + square)
    return max(middle - half, 0.0), min(middle + half, 1.0)


class RateSearch:
    """Chooses the next rate from the results of earlier trials."""

    def __init__(self, first_per_s: float, goal: SweepGoal) -> None:
        self._goal = goal
        self._next_per_s: float | None = first_per_s
        self._passing: float | None = None
        self._failing: float | None = None
        self._num_met = self._num_sent = self._num_trials = self._num_rates = 0
        self.steps: list[SweepStep] = []

    @property
    def next_per_s(self) -> float | None:
        """Returns the next rate to try; None if the search has ended."""
        return self._next_per_s

    @property
    def found_per_s(self) -> float | None:
        """Returns the highest rate that passed; None if no rate passed."""
        return self._passing

    @property
    def is_bounded(self) -> bool:
        """Returns True if a rate above the found one failed."""
        return self._failing is not None

    def record(self, num_met: int, num_sent: int) -> SweepStep:
        """Records one trial at `next_per_s`, and chooses the next rate."""
        assert self._next_per_s is not None, "the search is over"
        self._num_met += num_met
        self._num_sent += num_sent
        self._num_trials += 1
        step = self._judged(self._next_per_s)
        if step.passed is None:
            return step
        self.steps.append(step)
        self._num_met = self._num_sent = self._num_trials = 0
        if step.passed:
            self._passing = step.rate_per_s
        else:
            self._failing = step.rate_per_s
        self._next_per_s = self._following()
        return step

    def _judged(self, rate_per_s: float) -> SweepStep:
        low, high = wilson(self._num_met, self._num_sent)
        goal, passed = self._goal.attainment, None
        is_sure = low >= goal or high < goal
        if is_sure or self._num_trials >= MOST_TRIALS:
            passed = self._num_sent > 0 and self._num_met >= goal * self._num_sent
        return SweepStep(
            rate_per_s, self._num_met, self._num_sent, self._num_trials, passed, is_sure
        )

    def _following(self) -> float | None:
        passing, failing = self._passing, self._failing
        self._num_rates += 1
        if passing is not None and failing is not None:
            if failing <= passing * (1 + self._goal.precision):
                return None
            return math.sqrt(passing * failing)
        if passing is not None:
            return passing * 2 if self._num_rates <= MOST_DOUBLINGS else None
        return None if failing is None or self._num_rates > MOST_HALVINGS else failing / 2
