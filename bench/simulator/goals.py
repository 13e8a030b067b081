"""Goals that a benchmark's results are held against."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.common.report import Result


@dataclass(frozen=True, slots=True)
class Goals:
    """A bound for each result by name: a least value, for those `at_most` a greatest one."""

    bounds: Mapping[str, float]
    at_most: tuple[str, ...] = ()

    def cells(self, result: Result) -> tuple[str, str]:
        """Returns the goal and whether it is met, as a table shows them; empty without a goal."""
        goal = self.bounds.get(result.name)
        if goal is None:
            return "", ""
        is_met = result.value <= goal if result.name in self.at_most else result.value >= goal
        return f"{goal:g}", "yes" if is_met else "no"
