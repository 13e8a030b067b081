"""Runs the sections of `bench.gpu` within a time budget, and collects results and failures.

Sections run one by one. If a section raises an exception, it is printed and counted, and the next
section runs. A measurement for which there is no time is listed as skipped. This module does not
depend on the measurements.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from bench.common.report import Result, result_of
from engine.clock import Clock


@dataclass(frozen=True, slots=True)
class Goal:
    """The share of its limit that a result should reach."""

    result: Result
    share: float

    @property
    def is_met(self) -> bool:
        """Returns True if the result reaches the goal."""
        return (self.result.of_limit or 0.0) >= self.share


@dataclass(slots=True)
class GpuSession:
    """One run: its deadline, results, failures and skipped parts."""

    clock: Clock
    budget_s: float
    out: TextIO
    results: list[Result] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    begin_s: float = 0.0

    def __post_init__(self) -> None:
        self.begin_s = self.clock.now_s()

    @property
    def left_s(self) -> float:
        """Returns the seconds that are left of the budget."""
        return self.budget_s - (self.clock.now_s() - self.begin_s)

    def say(self, line: str) -> None:
        """Prints a line and flushes the output."""
        self.out.write(line + "\n")
        self.out.flush()

    def section(self, name: str, work: Callable[[], None], *, needs_s: float = 0.0) -> None:
        """Runs `work` if there is time. An exception counts as a failure."""
        if not self.has_time(name, needs_s):
            return
        begin_s = self.clock.now_s()
        self.say(f"== {name}")
        try:
            work()
        except Exception as error:  # any error is caught, so that the other sections still run
            self.fail(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            self.say(traceback.format_exc())
        self.say(f"   {self.clock.now_s() - begin_s:.1f} s")

    def has_time(self, what: str, needs_s: float) -> bool:
        """Returns True if there are `needs_s` seconds left for `what`. Otherwise lists `what` as
        skipped.
        """
        if self.left_s > needs_s:
            return True
        self.skip(what, "no time")
        return False

    def skip(self, what: str, why: str) -> None:
        """Lists `what` as skipped."""
        self.skipped.append(f"{what}: {why}")
        self.say(f"   skipped {what}: {why}")

    def fail(self, line: str) -> None:
        """Adds a failure."""
        self.failures.append(line)
        self.say(f"   FAILED {line}")

    def add(
        self,
        name: str,
        runs: Sequence[float],
        unit: str,
        *,
        limit: float | None = None,
        goal: float | None = None,
    ) -> None:
        """Adds a result, the median of its runs, with its limit and its goal."""
        result = result_of(name, runs, unit)
        result = result if limit is None else result.limited(limit)
        self.results.append(result)
        if goal is not None and limit is not None:
            self.goals.append(Goal(result, goal))
        self.say("   " + line_of(result))

    def conclude(self, *, judges_goals: bool) -> None:
        """Prints all results, goals, skipped parts and failures."""
        self.say("== results")
        for result in self.results:
            self.say("   " + line_of(result))
        if judges_goals:
            self.say("== goals")
            for goal in self.goals:
                verdict = "met" if goal.is_met else "MISSED"
                self.say(f"   {verdict:6} {line_of(goal.result)}, goal {goal.share:.0%}")
        for title, lines in (("skipped", self.skipped), ("failed", self.failures)):
            if lines:
                self.say(f"== {title}")
                for line in lines:
                    self.say(f"   {line}")
        self.say(f"{len(self.failures)} failures, {self.clock.now_s() - self.begin_s:.0f} s")


def line_of(result: Result) -> str:
    """Returns a result as a line of a table."""
    line = f"{result.name:44} {_number(result.value)} {result.unit:9}"
    if result.limit is not None and result.of_limit is not None:
        line += f" of {_number(result.limit)} {result.of_limit:7.1%}"
    for name, peer in result.peers.items():
        line += f", {peer.ratio:.2f} x {name}"
    return line.rstrip()


def _number(value: float) -> str:
    return f"{value:12,.1f}" if value >= 10 else f"{value:12.4f}"
