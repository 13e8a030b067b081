"""The figures of `bench elastic`. Pure.

| result               |       |                                                              |
|----------------------|-------|--------------------------------------------------------------|
| goodput/best_fixed   | 1/s   | requests that met both bounds, with the best fixed split     |
| goodput/planner      | 1/s   | the same with pools that the planner sets, from even ones on |
| goodput/fixed_P+D    | 1/s   | the same for each fixed split                                |
| ratio                |       | planner over best fixed split                                |
| attainment/…         | share | good requests, of all requests                               |
| react/first_flip     | s     | from a change of the mix to the first flip; the longest      |
| react/settled        | s     | from a change until the pools keep their sizes, within a     |
|                      |       | tenth of all workers, to the end of the phase; the longest   |
| flips, moved, lost   |       | changed roles; moved sequences; requests that failed         |

Each run has its own seed. The best fixed split is that of each seed, so it is known only after the
run. With fixed and with planned pools, the router knows the bounds and refuses requests that would
miss them. A refused request counts as a miss, not as lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from bench.common.goals import Goals
from bench.common.report import Figure
from bench.elastic.plan import ElasticPlan, TurningLoad
from bench.elastic.planned import SimulatedDecision

GOALS = Goals({"ratio": 1.3, "lost": 0.0}, at_most=("lost",))
STEADY = 0.1  # of all workers: pools that differ by less are the same


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """The counts of one load on one cluster."""

    num_good: int
    num_requests: int
    num_lost: int
    num_moved: int = 0
    decisions: Sequence[SimulatedDecision] = field(default=())

    @property
    def num_flips(self) -> int:
        """Workers that were told to change their role."""
        return sum(decision.num_flips for decision in self.decisions)


def figures_of(
    plan: ElasticPlan, fixed: dict[str, ElasticRun], planned: ElasticRun
) -> dict[str, Figure]:
    """Returns the figures of one seed."""
    best = max(fixed.values(), key=lambda played: played.num_good)
    named = {"best_fixed": best, "planner": planned, **fixed}
    first_flip_s, settled_s = reactions(planned.decisions, plan.turns, plan.num_workers)
    return {
        "ratio": Figure(planned.num_good / best.num_good, ""),
        **{
            f"goodput/{name}": Figure(played.num_good / plan.turns.duration_s, "1/s")
            for name, played in named.items()
        },
        **{
            f"attainment/{name}": Figure(played.num_good / played.num_requests, "share")
            for name, played in islice(named.items(), 2)
        },
        "react/first_flip": Figure(first_flip_s, "s"),
        "react/settled": Figure(settled_s, "s"),
        "flips": Figure(planned.num_flips, ""),
        "moved": Figure(planned.num_moved, ""),
        "lost": Figure(sum(p.num_lost for p in chain([planned], fixed.values())), ""),
    }


def reactions(
    decisions: Sequence[SimulatedDecision], turns: TurningLoad, num_workers: int
) -> tuple[float, float]:
    """Returns the longest times from a change of mix to the first flip, and to steady pools."""
    first, settled = [0.0], [0.0]
    for phase in range(1, turns.num_phases):
        begin_s, end_s = phase * turns.phase_s, (phase + 1) * turns.phase_s
        during = [one for one in decisions if begin_s <= one.at_s < end_s]
        flips_s = [one.at_s - begin_s for one in during if one.num_flips]
        if not flips_s:
            continue
        last = during[-1].plan.prefill
        off = [abs(one.plan.prefill - last) > STEADY * num_workers for one in during]
        first.append(flips_s[0])
        settled.append(
            max(
                (o.at_s - begin_s for o, is_off in zip(during, off, strict=True) if is_off),
                default=0.0,
            )
        )
    return max(first), max(settled)
