"""Goals that a benchmark's results are held against."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from bench.common.report import Result


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds of results, by patterns of their names.

    A bound is the greatest value for names that match a pattern of `at_most`, else the least one.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    at_most: tuple[str, ...] = ()

    def bound(self, name: str) -> float | None:
        """The goal of a result; None if it has none."""
        found = (bound for pattern, bound in self.bounds.items() if fnmatchcase(name, pattern))
        return next(found, None)

    def is_met(self, result: Result) -> bool | None:
        """True if the result reaches its goal; None if it has none."""
        bound = self.bound(result.name)
        if bound is None:
            return None
        if any(fnmatchcase(result.name, pattern) for pattern in self.at_most):
            return result.value <= bound
        return result.value >= bound


NO_GOALS = Goals()
