"""The figures of a run of `bench chaos`. Pure.

| result                       | unit |                                                           |
|------------------------------|------|-----------------------------------------------------------|
| lost, changed                | req  | see `bench.chaos.checker`                                 |
| leaked_blocks, leaked_leases |      | that idle workers and stores still hold after the load    |
| leaked_processes             |      | processes that are alive after the deployment's end       |
| unsettled                    |      | 1: the pools did not get their earlier sizes back         |
| missing                      |      | planned kinds of faults that hit no service               |
| longest_stall_s              | s    | longest time between two chunks of any stream             |
| longest_first_s              | s    | longest time to a first chunk                             |
| calm_stall_s                 | s    | longest_stall_s of the undisturbed run                    |
| mean_e2e_s                   | s    | mean time of an answer since its request was first sent   |
| retried                      | req  | requests that the router placed more than once            |
| reconnected                  | req  | requests that were sent again after a gateway's death     |
| injected/KIND                |      | injected faults of this kind                              |
| skipped                      |      | faults without a possible victim                          |
| unfinished                   |      | faults that failed, such as orders not carried out        |
| affected/KIND                | req  | silent during a fault, or placed or sent a second time    |
| store_blocks                 |      | blocks in the store's memory at the end                   |
| store_offers                 |      | prefixes that the store leased since its process started  |
| outage_mean_s, outage_max_s  | s    | time without a worker, as the controller observed it      |
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.chaos.checker import (
    Injected,
    Reply,
    RequestEnd,
    RequestVerdict,
    affected,
    longest_stall,
)
from bench.chaos.plan import (
    BREAKS_CONNECTIONS,
    ChaosPlan,
    Fault,
    FaultKind,
    is_full,
)
from bench.chaos.services import StoreLeft
from bench.chaos.streams import ChaosRequest, ReceivedPiece, ReceivedStream
from bench.common.report import Figure, Result, results_of

MUST_BE_ZERO = (
    "lost",
    "changed",
    "leaked_blocks",
    "leaked_leases",
    "leaked_processes",
    "unsettled",
    "unfinished",
    "missing",
)
STALL_GOAL_S = 10.0  # goal for longest_stall_s; the command succeeds even if the goal is missed
NUM_TOLD = 5  # number of examples that are printed for each kind of failure
NEAR_S = 20.0  # faults within this many seconds of a request are reported with it


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Blocks, leases and processes that are left at the end of the run."""

    blocks: int
    leases: int
    is_whole: bool = True  # all workers run and are idle
    store: StoreLeft = field(default_factory=StoreLeft)
    processes: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without a worker, as the controller observed it."""

    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """All measurements and verdicts of a run."""

    plan: ChaosPlan
    asked: tuple[ChaosRequest, ...]
    expected: tuple[Reply, ...]
    # all streams of each request, in order of the requests
    streams: tuple[tuple[ReceivedStream, ...], ...]
    verdicts: tuple[RequestVerdict, ...]
    injected: tuple[Injected, ...]
    skipped: tuple[Fault, ...]
    outages: tuple[Outage, ...]
    left: LeftBehind
    calm_stall_s: float  # the longest stall of the undisturbed run
    duration_s: float

    def requests_of(self, end: RequestEnd) -> list[int]:
        """Returns the verdicts of requests with this outcome."""
        return [i for i, verdict in enumerate(self.verdicts) if verdict.end is end]


def figures_of(run: ChaosRun) -> dict[str, Figure]:
    """Returns all figures of one run, by name."""
    kinds = Counter(fault.kind for fault in run.injected)
    hit = affected(run.streams, run.injected)
    firsts_s = [s[0].at_s - t for s, t in ((_pieces(r), r[0].sent_s) for r in run.streams) if s]
    outages_s = [outage.seconds for outage in run.outages]
    counts = {
        "lost": len(run.requests_of(RequestEnd.LOST)),
        "changed": len(run.requests_of(RequestEnd.CHANGED)),
        "leaked_blocks": run.left.blocks + run.left.store.leaked_blocks,
        "leaked_leases": run.left.leases + run.left.store.leaked_leases,
        "leaked_processes": len(run.left.processes),
        "unsettled": int(not run.left.is_whole),
        "missing": len(missing(run)),
        "requests": len(run.asked),
        "retried": sum(any(s.num_attempts > 1 for s in streams) for streams in run.streams),
        "reconnected": sum(len(streams) > 1 for streams in run.streams),
        "injected": sum(kinds.values()),
        **{f"injected/{kind}": count for kind, count in sorted(kinds.items())},
        "skipped": len(run.skipped),
        "unfinished": sum(fault.failure is not None for fault in run.injected),
        **{f"affected/{kind}": count for kind, count in sorted(hit.items())},
    }
    if run.plan.has_store:
        store = run.left.store
        counts |= {"store_blocks": store.num_blocks, "store_offers": store.num_offers}
    times_s = {
        "longest_stall_s": longest_stall(run.streams, run.injected).seconds,
        "longest_first_s": max(firsts_s, default=0.0),
        "calm_stall_s": run.calm_stall_s,
        "mean_e2e_s": statistics.mean(s[-1].ended_s - s[0].sent_s for s in run.streams),
        "duration_s": run.duration_s,
    }
    if outages_s:
        times_s |= {"outage_mean_s": statistics.mean(outages_s), "outage_max_s": max(outages_s)}
    units = dict.fromkeys(("lost", "changed", "requests", "retried", "reconnected"), "req")
    return {
        **{name: Figure(count, units.get(name, "")) for name, count in counts.items()},
        **{name: Figure(value_s, "s") for name, value_s in times_s.items()},
    }


def results(run: ChaosRun) -> tuple[Result, ...]:
    """Returns the figures as results of a report."""
    return results_of([figures_of(run)])


def row_of(run: ChaosRun) -> dict[str, Figure]:
    """Returns the main figures of a run with a single kind of fault. The names contain the kind."""
    found = figures_of(run)
    [kind] = run.plan.kinds
    wrong = ("leaked_blocks", "leaked_leases", "leaked_processes")
    row = {
        "injected": found["injected"],
        "lost": found["lost"],
        "changed": found["changed"],
        "leaked": Figure(sum(found[name].value for name in wrong), ""),
        "wrong": Figure(sum(found[n].value for n in ("unsettled", "unfinished", "missing")), ""),
        "longest_stall_s": found["longest_stall_s"],
        "longest_first_s": found["longest_first_s"],
    }
    return {f"{kind}/{name}": figure for name, figure in row.items()}


def missing(run: ChaosRun) -> list[FaultKind]:
    """Returns the planned kinds that hit no service.

    A run that is too short for all kinds needs only one fault of any kind.
    """
    if run.injected and not is_full(run.plan):
        return []
    return _absent(run)


def has_passed(found: Sequence[Result]) -> bool:
    """Returns True if nothing was lost, changed or leaked, and no planned kind of fault is
    missing.
    """
    names = (*MUST_BE_ZERO, "leaked", "wrong")
    return not any(each.value for each in found if each.name.rpartition("/")[2] in names)


def complaints(run: ChaosRun) -> list[str]:
    """Describes each failure, with facts that help to find its cause."""
    lines = [f"{kind}: requested, but hit no service" for kind in missing(run)]
    for end in (RequestEnd.LOST, RequestEnd.CHANGED):
        numbers = run.requests_of(end)
        lines += [
            f"{end}: request {i}, {run.asked[i].kind}: {run.verdicts[i].reason};"
            f" {_faults_of(run, i)}"
            for i in numbers[:NUM_TOLD]
        ]
        if len(numbers) > NUM_TOLD:
            lines.append(f"{end}: {len(numbers) - NUM_TOLD} more")
    left = run.left
    if left.detail:
        lines.append(f"left behind: {left.blocks} blocks, {left.leases} leases: {left.detail}")
    if left.store.leaked_blocks or left.store.leaked_leases:
        lines.append(f"left behind in the store: {left.store}")
    lines += [f"still alive: {process}" for process in left.processes]
    lines += [f"{fault}: {fault.failure}" for fault in run.injected if fault.failure]
    return lines


def _faults_of(run: ChaosRun, number: int) -> str:
    """Returns the times of a request's streams and of gateway faults close to them, in seconds."""
    streams = run.streams[number]
    begun_s = streams[0].sent_s
    told = [f"sent {s.sent_s - begun_s:.1f}..{s.ended_s - begun_s:.1f}" for s in streams]
    told += [
        f"{fault.kind} {fault.begun_s - begun_s:.1f}..{fault.ended_s - begun_s:.1f}"
        for fault in run.injected
        if fault.kind in BREAKS_CONNECTIONS and abs(fault.begun_s - begun_s) < NEAR_S
    ]
    return ", ".join(told)


def story(run: ChaosRun) -> list[str]:
    """Returns lines about the longest stall, the fault that caused it, and the goal.

    For a run that is too short for all kinds, the lines also name the kinds that did not occur.
    """
    stall = longest_stall(run.streams, run.injected)
    cause = "no fault" if stall.fault is None else str(stall.fault)
    line = f"longest stall: {stall.seconds:.2f} s, request {stall.request}, with {cause}"
    if is_full(run.plan):
        verdict = "met" if stall.seconds <= STALL_GOAL_S else "MISSED"
        return [f"{line}; goal of {STALL_GOAL_S:g} s {verdict}"]
    return [line, f"too short for all kinds of faults; missing: {', '.join(_absent(run))}"]


def _absent(run: ChaosRun) -> list[FaultKind]:
    hit = {fault.kind for fault in run.injected}
    return [kind for kind in run.plan.kinds if kind not in hit]


def _pieces(streams: Sequence[ReceivedStream]) -> list[ReceivedPiece]:
    return [piece for stream in streams for piece in stream.pieces]
