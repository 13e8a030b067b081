"""Goals with which a benchmark's results are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from bench.common.report import Result


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds of results, by patterns of their names.

    For names that match a pattern of `at_most`, the bound is an upper bound, else a lower bound.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    at_most: tuple[str, ...] = ()

    def bound(self, name: str) -> float | None:
        """Returns the goal of a result; None if the result has no goal."""
        found = (bound for pattern, bound in self.bounds.items() if fnmatchcase(name, pattern))
        return next(found, None)

    def is_met(self, result: Result) -> bool | None:
        """True if the result reaches its goal; None if the result has no goal."""
        bound = self.bound(result.name)
        if bound is None:
            return None
        if any(fnmatchcase(result.name, pattern) for pattern in self.at_most):
            return result.value <= bound
        return result.value >= bound


NO_GOALS = Goals()
