"""Judges a version that takes over by the requests that it has served. Pure.

A version is given up if more of its requests fail than `update.max_failed`, and more than twice the
share of the other versions. The same holds if more of its answers are late, beyond `router.slo_*`,
than of the others by `update.max_late`. An answer that hangs counts as late before it ends. Both
shares count from the begin of the present step, so that all versions have had the same load, and
only from `update.min_requests` on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from engine.config import UpdateConfig
from engine.control import CanaryVerdict, EndedCounts, GatewayReport


@dataclass(frozen=True, slots=True)
class CanaryStanding:
    """How a version serves in the present step. `begun_s` is None before its first request."""

    verdict: CanaryVerdict
    begun_s: float | None
    own: EndedCounts
    others: EndedCounts


ByGateway = tuple[EndedCounts, ...]  # in the order of the gateways' names


def tally(reports: Iterable[GatewayReport | None], names: Iterable[str]) -> ByGateway:
    """Sums over these versions what each gateway reports."""
    wanted = set(names)
    return tuple(
        _total(
            EndedCounts(said.num_ended, said.num_failed, said.num_late)
            for name, said in ({} if report is None else report.versions).items()
            if name in wanted
        )
        for report in reports
    )


def hung_of(reports: Iterable[GatewayReport | None], names: Iterable[str]) -> int:
    """Sums the answers of these versions that hang now."""
    versions = [{} if report is None else report.versions for report in reports]
    return sum(said[name].num_hung for name in names for said in versions if name in said)


def between(before: ByGateway, now: ByGateway) -> EndedCounts:
    """Sums what has ended between two tallies. A gateway that is new counts from its start."""
    return _total(
        each.since(was) for was, each in zip_longest(before, now, fillvalue=EndedCounts())
    )


def _total(counts: Iterable[EndedCounts]) -> EndedCounts:
    found = list(counts)
    return EndedCounts(
        sum(each.ended for each in found),
        sum(each.failed for each in found),
        sum(each.late for each in found),
    )


def fault_of(
    new: EndedCounts,
    others: EndedCounts,
    rules: UpdateConfig,
    hung: tuple[int, int] = (0, 0),
) -> str | None:
    """Returns why the new version is to be given up; None if nothing speaks against it yet.

    `hung` counts the answers that hang now, of the new version and of the others.
    """
    new, others = (
        EndedCounts(each.ended + num, each.failed, each.late + num)
        for each, num in zip((new, others), hung, strict=True)
    )
    if new.ended < rules.min_requests:
        return None
    of_others = max(others.ended, 1)
    if new.failed / new.ended > max(rules.max_failed, 2 * others.failed / of_others):
        return (
            f"{new.failed} of its {new.ended} requests failed, of the others' "
            f"{others.failed} of {others.ended}"
        )
    if new.late / new.ended > rules.max_late + others.late / of_others:
        hang = f" ({hung[0]} hang)" if hung[0] else ""
        return (
            f"{new.late} of its {new.ended} answers were late{hang}, of the others' "
            f"{others.late} of {others.ended}"
        )
    return None


class CanaryWatch:
    """Counts from the begin of a step: a share of requests that a version has."""

    def __init__(self, rules: UpdateConfig) -> None:
        self.rules = rules
        self._step: tuple[str, int] | None = None  # the version and its weight
        self._begun_s = 0.0
        self._before: tuple[ByGateway, ByGateway] = ((), ())
        self._ended = (EndedCounts(), EndedCounts())  # in the step, as it was seen last

    def remove(self) -> None:
        """Ends the step: an earlier attempt of the same name does not count for the next one."""
        self._step = None

    @property
    def standing(self) -> CanaryStanding:
        """What was seen last."""
        if self._step is None:
            return CanaryStanding(
                CanaryVerdict.NOT_PROBED, None, own=EndedCounts(), others=EndedCounts()
            )
        own, others = self._ended
        is_enough = own.ended >= self.rules.min_requests
        verdict = CanaryVerdict.GOOD if is_enough else CanaryVerdict.TOO_FEW
        return CanaryStanding(verdict, self._begun_s, own, others)

    def check(
        self,
        step: tuple[str, int],
        new: ByGateway,
        others: ByGateway,
        now_s: float,
        hung: tuple[int, int] = (0, 0),
    ) -> str | None:
        """Returns why the version is to be given up, by what ended in this step or hangs now."""
        if step != self._step:
            self._step, self._begun_s, self._before = step, now_s, (new, others)
        before_new, before_others = self._before
        self._ended = (between(before_new, new), between(before_others, others))
        return fault_of(*self._ended, self.rules, hung)

    def has_held(self, new: ByGateway, hold_s: float, now_s: float) -> bool:
        """True if the step has lasted long enough, with enough requests."""
        num_ended = between(self._before[0], new).ended
        return now_s - self._begun_s >= hold_s and num_ended >= self.rules.min_requests
