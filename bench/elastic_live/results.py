"""The figures of `bench elastic-live`. Pure.

| result         |       |                                                                         |
|----------------|-------|-------------------------------------------------------------------------|
| scaling/…      |       | rate of a mix with all workers but one, over the rate with one worker   |
| goodput/…      | 1/s   | requests that met both bounds: best fixed split, planner, each split    |
| ratio          |       | planner over the best fixed split of the same repetition                |
| attainment/…   | share | good requests, of all requests                                          |
| flips          |       | changed roles in a planned run                                          |
| refused        |       | requests answered with 429, which count as a miss                       |
| lost           |       | requests that ended in any other way than an answer                     |
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.client.load import LoadRun, SloBounds, meets
from bench.common.report import Figure, Result, results_of
from bench.elastic_live.plan import MIXES, LivePlan, MeasuredPace, name_of

REFUSED = "http_429"


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One run of one setting."""

    setting: int | None
    repeat: int
    load: LoadRun
    num_flips: int

    def num_good(self, slo: SloBounds) -> int:
        """Returns the number of requests that met both bounds."""
        return sum(meets(answer, slo) for answer in self.load.answers)


def results(plan: LivePlan, pace: MeasuredPace, runs: Sequence[LiveRun]) -> tuple[Result, ...]:
    """Returns all figures over the repetitions."""
    repeats = sorted({run.repeat for run in runs})
    return results_of(
        [_figures(plan, pace, [r for r in runs if r.repeat == one]) for one in repeats]
    )


def _figures(plan: LivePlan, pace: MeasuredPace, runs: Sequence[LiveRun]) -> dict[str, Figure]:
    slo = pace.slo
    by_name = {name_of(plan, setting): _of(runs, setting) for setting in plan.settings}
    planned = by_name["planner"]
    best = max(
        (run for run in by_name.values() if run is not planned),
        key=lambda run: run.num_good(slo),
    )
    named = {"best_fixed": best, **by_name}
    good = {name: run.num_good(slo) for name, run in named.items()}
    failures = [failure for run in runs for failure in run.load.failures]
    num_refused = sum(failure.kind == REFUSED for failure in failures)
    return {
        "ratio": Figure(good["planner"] / max(good["best_fixed"], 1), ""),
        **{f"goodput/{name}": Figure(n / plan.duration_s, "1/s") for name, n in good.items()},
        **{
            f"attainment/{name}": Figure(good[name] / len(run.load.outcomes), "share")
            for name, run in named.items()
        },
        **{f"scaling/{mix.name}": Figure(pace.most[mix] / pace.one[mix], "") for mix in MIXES},
        "flips": Figure(planned.num_flips, ""),
        "refused": Figure(num_refused, ""),
        "lost": Figure(len(failures) - num_refused, ""),
    }


def _of(runs: Sequence[LiveRun], setting: int | None) -> LiveRun:
    return next(run for run in runs if run.setting == setting)
