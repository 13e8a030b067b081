"""Judges a version that takes over by the requests that the version has served. Pure.

A version is aborted if its share of failed requests exceeds both `update.max_failed` and twice the
share of the other versions. A version is also aborted if its share of late answers (later than
`router.slo_*`) exceeds the other versions' share by `update.max_late`. An answer that hangs counts
as late before it ends. Both shares are counted from the start of the present step, so that the
compared requests had the same load. A version is judged once at least `update.min_requests` of its
requests have ended or hang.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from engine.config import UpdateConfig
from engine.control import CanaryVerdict, EndedCounts, GatewayReport


@dataclass(frozen=True, slots=True)
class CanaryStanding:
    """The results of a version in the present step.

    `begun_s` is None before the version's first request.
    """

    verdict: CanaryVerdict
    begun_s: float | None
    own: EndedCounts
    others: EndedCounts


ByGateway = tuple[EndedCounts, ...]  # in the order of the gateways' names


def tally(reports: Iterable[GatewayReport | None], names: Iterable[str]) -> ByGateway:
    """Returns the counts that each gateway reported, summed over these versions."""
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
    """Returns the number of answers of these versions that hang at present."""
    versions = [{} if report is None else report.versions for report in reports]
    return sum(said[name].num_hung for name in names for said in versions if name in said)


def between(before: ByGateway, now: ByGateway) -> EndedCounts:
    """Returns the requests that ended between two tallies.

    For a new gateway, all its requests count.
    """
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
    """Returns the reason to abort the new version. None if there is no reason yet.

    `hung` has two numbers of answers that hang at present: the new version's, and all others'.
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
    """Counts results since the start of a step. During a step the version's share is fixed."""

    def __init__(self, rules: UpdateConfig) -> None:
        self.rules = rules
        self._step: tuple[str, int] | None = None  # the version and its weight
        self._begun_s = 0.0
        self._before: tuple[ByGateway, ByGateway] = ((), ())
        # Counts in the present step, at the last check.
        self._ended = (EndedCounts(), EndedCounts())

    def remove(self) -> None:
        """Ends the step. A later version of the same name then starts without these counts."""
        self._step = None

    @property
    def standing(self) -> CanaryStanding:
        """The version's results at the last check."""
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
        """Judges the version by the step's ended and hanging requests.

        Returns the reason to abort the version, or None.
        """
        if step != self._step:
            self._step, self._begun_s, self._before = step, now_s, (new, others)
        before_new, before_others = self._before
        self._ended = (between(before_new, new), between(before_others, others))
        return fault_of(*self._ended, self.rules, hung)

    def has_held(self, new: ByGateway, hold_s: float, now_s: float) -> bool:
        """True if the step has lasted for `hold_s` seconds and has had enough requests."""
        num_ended = between(self._before[0], new).ended
        return now_s - self._begun_s >= hold_s and num_ended >= self.rules.min_requests
