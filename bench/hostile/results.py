"""The figures of `bench hostile`. Pure.

| result                 | unit |                                                                |
|------------------------|------|----------------------------------------------------------------|
| bodies/<status>        |      | hostile requests by outcome; `left`: the client left after 5 s |
| bodies/wrong           |      | server errors but 503, and connections that broke              |
| slow/…                 |      | connections opened, refused, closed by the server              |
| slow/probe_p50, _max   | ms   | honest requests while slow connections are open                |
| disconnects/<stage>    |      | clients that left, by the part of the request that they sent   |
| pause/<phase>          | ms   | longest gap of an honest stream; under 20 ms: reported as 0    |
| first_token/<phase>    | ms   | longest wait of an honest client for a first token             |
| assault/<name>/<status> |     | requests of an assault, by outcome                             |
| assault/<name>/pause   | ms   | longest gap, minus the longest gap of the calm phase           |
| assault/<name>/first_token | ms | longest wait for a first token, minus that of the calm phase |
| assault/<name>/kept    | %    | growth of the gateways' memory, at most 30 s later             |
| honest/broken          |      | honest answers that did not end correctly                      |
| memory/<kind>_growth   | %    | growth of private memory after the warm-up                     |
| left/blocks, leases    |      | blocks and leases that idle workers still hold                 |
| left/ended             |      | services that ended during the waves                           |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.common.report import Figure, Result, results_of
from bench.common.stats import percentile
from bench.hostile.assaults import LOADING, MAX_KEPT, AssaultRun
from bench.hostile.waves import Outcomes, Slow

MIB = 2**20
CALM = "calm"  # the phase without hostile clients, before the waves
MAX_RSS_GROWTH = 0.05
# allowed worst pause of an honest stream, minus the worst pause in the calm phase
MAX_BEYOND_CALM_S = 0.3
MAX_PAUSE_S = 0.25  # allowed longest pause of an honest stream, on an otherwise idle machine


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the run, with its begin and end on the machine's monotonic clock."""

    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class HonestReports:
    """Reports of the honest clients: gaps of their streams, waits for first tokens, and broken
    answers.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    # waits for first tokens, as (begin, end) in seconds
    firsts: list[tuple[float, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def longest_s(self, phase: Phase) -> float:
        """Returns the seconds of the longest part of a gap inside a phase; 0 if no gap was
        reported.
        """
        return _longest_s(self.gaps, phase)

    def longest_first_s(self, phase: Phase) -> float:
        """Returns the longest wait for a first token in the phase, in seconds."""
        return _longest_s(self.firsts, phase)


def _longest_s(waits: Sequence[tuple[float, float]], phase: Phase) -> float:
    parts = (min(end, phase.end_s) - max(begin, phase.begin_s) for begin, end in waits)
    return max(0.0, max(parts, default=0.0))


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Private memory in bytes, before and after the measured waves."""

    before: dict[str, int]
    after: dict[str, int]


@dataclass(frozen=True, slots=True)
class HostileRun:
    """All measurements of a run."""

    phases: tuple[Phase, ...]
    reports: HonestReports
    bodies: Outcomes
    slow: Slow
    disconnects: dict[str, int]
    memory: MemorySample
    blocks_left: int
    leases_left: int
    num_ended: int  # services that ended during the waves and were replaced
    assaults: tuple[AssaultRun, ...] = ()


def results(run: HostileRun) -> tuple[Result, ...]:
    """Returns the results in the order of the table in this module's docstring."""
    figures = {
        f"bodies/{status}": Figure(count, "")
        for status, count in sorted(run.bodies.statuses.items(), key=lambda pair: str(pair[0]))
    }
    figures["bodies/wrong"] = Figure(run.bodies.num_wrong, "")
    slow = run.slow
    figures["slow/opened"] = Figure(slow.num_opened, "")
    figures["slow/refused"] = Figure(slow.num_refused, "")
    figures["slow/closed"] = Figure(slow.num_closed, "")
    figures["slow/probes_failed"] = Figure(slow.num_probes_failed, "")
    if slow.probes_s:
        figures["slow/probe_p50"] = Figure(1e3 * percentile(slow.probes_s, 50), "ms")
        figures["slow/probe_max"] = Figure(1e3 * max(slow.probes_s), "ms")
    for stage, count in sorted(run.disconnects.items()):
        figures[f"disconnects/{stage.replace(' ', '_')}"] = Figure(count, "")
    for phase in run.phases:
        figures[f"pause/{phase.name}"] = Figure(1e3 * run.reports.longest_s(phase), "ms")
        figures[f"first_token/{phase.name}"] = Figure(
            1e3 * run.reports.longest_first_s(phase), "ms"
        )
    for assault in run.assaults:
        for status, count in sorted(assault.ends.items()):
            figures[f"assault/{assault.name}/{status}"] = Figure(count, "")
        beyond_s = beyond_calm_s(run, assault.name)
        figures[f"assault/{assault.name}/pause"] = Figure(1e3 * beyond_s, "ms")
        first_s = first_beyond_calm_s(run, assault.name)
        figures[f"assault/{assault.name}/first_token"] = Figure(1e3 * first_s, "ms")
        figures[f"assault/{assault.name}/kept"] = Figure(100 * assault.kept, "%")
    figures["honest/broken"] = Figure(len(run.reports.broken), "")
    for kind, before in run.memory.before.items():
        figures[f"memory/{kind}"] = Figure(before / MIB, "MiB")
        figures[f"memory/{kind}_growth"] = Figure(100 * growth(run, kind), "%")
    figures["left/blocks"] = Figure(run.blocks_left, "")
    figures["left/leases"] = Figure(run.leases_left, "")
    figures["left/ended"] = Figure(run.num_ended, "")
    return results_of([figures])


def growth(run: HostileRun, kind: str) -> float:
    """Returns the growth of memory as a share; negative if it shrank."""
    return run.memory.after[kind] / run.memory.before[kind] - 1


def beyond_calm_s(run: HostileRun, name: str) -> float:
    """Returns a phase's longest pause minus the longest pause of the calm phase. Negative if the
    phase's pause was shorter.
    """
    longest_s = {phase.name: run.reports.longest_s(phase) for phase in run.phases}
    return longest_s[name] - longest_s[CALM]


def first_beyond_calm_s(run: HostileRun, name: str) -> float:
    """Returns a phase's longest wait for a first token minus the longest such wait of the calm
    phase.
    """
    longest_s = {phase.name: run.reports.longest_first_s(phase) for phase in run.phases}
    return longest_s[name] - longest_s[CALM]


def _complaints_of_assaults(run: HostileRun) -> Iterator[str]:
    for assault in run.assaults:
        name = assault.name
        if (beyond_s := beyond_calm_s(run, name)) > MAX_BEYOND_CALM_S:
            yield f"{name}: an honest stream paused {beyond_s:.2f} s beyond the calm"
        beyond_s = first_beyond_calm_s(run, name)
        if name not in LOADING and beyond_s > MAX_BEYOND_CALM_S:
            yield f"{name}: an honest client's first token came {beyond_s:.2f} s beyond the calm"
        if assault.kept > MAX_KEPT:
            yield f"{name}: the gateway keeps {100 * assault.kept:.1f} % more memory"


def complaints(run: HostileRun) -> list[str]:
    """Returns the violated bounds. The command fails if there is any."""
    found = [f"server error: {example}" for example in run.bodies.examples]
    found += [f"an honest stream: {line}" for line in run.reports.broken[:5]]
    for kind in run.memory.before:
        if (grown := growth(run, kind)) > MAX_RSS_GROWTH:
            found.append(f"memory of {kind}s grew by {100 * grown:.1f} %")
    found += _complaints_of_assaults(run)
    if run.blocks_left or run.leases_left:
        found.append(f"left behind: {run.blocks_left} blocks, {run.leases_left} leases")
    if run.num_ended:
        found.append(f"{run.num_ended} services ended")
    if run.slow.num_probes_failed:
        found.append(f"{run.slow.num_probes_failed} honest requests failed beside slow connections")
    return found


def warnings(run: HostileRun) -> Sequence[str]:
    """Returns facts for the reader that need not be the server's fault."""
    return [
        f"an honest stream paused for {pause_s:.2f} s in the phase {phase.name}"
        for phase in run.phases
        if (pause_s := run.reports.longest_s(phase)) > MAX_PAUSE_S
    ]
