"""Measures the speed of movers: opens all movers, which then pull one after the other.

Before the first measurement, all movers are open and have carried out every case once, and the
result is verified byte by byte. Then each repetition measures every case with every way of every
mover once. Each repetition has its own order, so that other load affects all movers alike. While
one mover works, all others wait in system calls.

An open mover has a pool of 96 MiB at each end. Baton's movers have one pool for each block size.
All movers together use 3 GiB of memory.

This module also computes the results of `bench kv` from the measured times:

| result                                       | unit  |                                        |
|----------------------------------------------|-------|----------------------------------------|
| <mover>/<size>                               | GiB/s | pulls of 64 MiB in blocks of this size |
| <mover>/<size>/<number>                      | GiB/s | pulls of this number of blocks         |
| <mover>/<size>/latency                       | µs    | pull of one block                      |
| hidden_share/<transport>                     | share | part of the transfer time during which |
|                                              |       | prefill still ran                      |
| kv_transfer/<transport>, kv_exposed/…        | ms    | transfer time, and its part after the  |
|                                              |       | prefill                                |
| first_token_after_handoff/<phase>/<transport>| ms    | from the first token to the second     |
| background/cpu                               | %     | share of cores used by other programs  |

A backend's `limit` is the median of the fastest way of the limit's mover. Limits are also reported
as results. If a backend pulls half of the heads, its limit is the same backend with whole blocks. A
peer's `ratio` is ours over theirs; for latencies, less than one is better.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import fsum
from types import MappingProxyType

from bench.common.background import BusyWatch, busy_results, busy_warning
from bench.common.command import Say
from bench.common.report import Figure, Missing, Result, result_of
from bench.lab.experiment import order_of
from bench.lab.kv.cases import KvCase, KvPulls, Mover, NotMovable, WrongBytes, limit_of, ways_of
from bench.processes.driven import DrivenFailed

# movers that work on every machine; if one fails, the benchmark fails
REQUIRED = ("shm", "zmq", "memcpy", "tcp", "slab")
WARM_UP = -1  # repetition number of the warm-up; no other repetition uses its blocks
IDLE_CHECK_S = 0.3


@dataclass(frozen=True, slots=True)
class TimeKey:
    """The mover, way and case that a time belongs to."""

    mover: str
    way: str
    case: KvCase


@dataclass(frozen=True, slots=True)
class KvMeasured:
    """The times of all repetitions."""

    seconds: Mapping[TimeKey, tuple[float, ...]]  # one median for each repetition
    background: tuple[float, ...] = ()  # share of the CPU that other programs used, by repetition
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()

    @property
    def movers(self) -> list[str]:
        """Returns the names of the measured movers."""
        return list(dict.fromkeys(key.mover for key in self.seconds))

    @property
    def cases(self) -> list[KvCase]:
        """Returns the measured cases, by block size and number of blocks."""
        cases = dict.fromkeys(key.case for key in self.seconds)
        return sorted(cases, key=lambda case: (case.block_bytes, case.num_blocks))


@dataclass(slots=True)
class MoverContest:
    """The movers that are running, by name. A mover that fails is removed."""

    pulls: KvPulls
    movers: dict[str, Mover] = field(default_factory=dict)
    ways: list[tuple[str, str]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, error: Exception) -> None:
        """Removes a failed mover. Raises the error if the mover is required."""
        if name in REQUIRED:
            raise error
        mover = self.movers.pop(name, None)
        if mover is not None:
            mover.close()
        self.ways = [(other, way) for other, way in self.ways if other != name]
        reason = error.reason if isinstance(error, DrivenFailed) else str(error)
        self.missing.append(Missing(name, reason))

    def sessions(self) -> list[int]:
        """Returns the session ids of all running mover processes."""
        processes = [process for mover in self.movers.values() for process in mover.processes]
        return [process.session for process in processes if process.session]

    def open(self, movers: Mapping[str, Callable[[], Mover]], stack: ExitStack, say: Say) -> None:
        """Starts all movers at once, then opens them one by one."""
        for name, made in movers.items():
            try:
                mover = made()
            except NotMovable as error:
                self.drop(name, error)
                continue
            self.movers[name] = mover
            stack.callback(mover.close)
            mover.start()
        for name, mover in [*self.movers.items()]:
            say(f"opening {name}")
            try:
                facts = mover.open(self.pulls)
                self.ways += ways_of(mover, facts)
            except DrivenFailed as error:
                self.drop(name, error)
                continue
            if facts.get("version"):
                self.versions[name] = str(facts["version"])

    def verify(self) -> None:
        """Carries out every case once with every way of every mover, and compares the bytes."""
        for name, way in [*self.ways]:
            for case in self.pulls.cases:
                if name not in self.movers:
                    break
                try:
                    self.movers[name].verify(way, case, self.pulls.of(case, WARM_UP)[0])
                except (DrivenFailed, WrongBytes) as error:
                    self.drop(name, error)

    def repetition(self, repeat: int) -> Iterator[tuple[TimeKey, float]]:
        """Yields the median seconds of the pulls of each case."""
        pulls = {case: self.pulls.of(case, repeat) for case in self.pulls.cases}
        turns = [(name, way, case) for name, way in self.ways for case in pulls]
        for name, way, case in order_of(turns, self.pulls.seed, repeat):
            mover = self.movers.get(name)
            if mover is None:
                continue
            try:
                seconds = mover.move(way, case, pulls[case])
            except DrivenFailed as error:
                self.drop(name, error)
                continue
            yield TimeKey(name, way, case), statistics.median(seconds)


def contest(pulls: KvPulls, movers: Mapping[str, Callable[[], Mover]], say: Say) -> KvMeasured:
    """Opens, verifies and measures all movers.

    Raises DrivenFailed and WrongBytes if shared memory, ZeroMQ or one of their limits fails. Any
    other mover that fails is reported as missing.
    """
    with ExitStack() as stack:
        running = MoverContest(pulls)
        running.open(movers, stack, say)
        say("moving everything once, and comparing the bytes")
        running.verify()
        seconds: dict[TimeKey, list[float]] = {}
        busy = BusyWatch(running.sessions)
        for repeat in range(pulls.num_repeats):
            say(f"pulls, repetition {repeat + 1} of {pulls.num_repeats}")
            with busy.repetition(idle_s=IDLE_CHECK_S):
                for key, median_s in running.repetition(repeat):
                    seconds.setdefault(key, []).append(median_s)
        return KvMeasured(
            seconds={
                key: tuple(runs) for key, runs in seconds.items() if key.mover in running.movers
            },
            background=tuple(busy.shares),
            versions=running.versions,
            missing=tuple(running.missing),
        )


GIB = 2**30
# stages of the timeline between the first token and the second
PHASES = ("kv_wait", "decode_queue", "first_step")
TRANSFER = ("kv_transfer", "kv_exposed")
AFTER_HANDOFF = "first_token_after_handoff"
COMPILED = "c"  # the way of memcpy whose loop is compiled

Timeline = Mapping[str, float]  # seconds by stage


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Timelines of requests whose prefill and decoding ran on different workers."""

    transport: str
    repetitions: tuple[tuple[Timeline, ...], ...]
    num_failed: int = 0


def results(
    measured: KvMeasured,
    handoffs: Sequence[Handoffs] = (),
    *,
    movers: Sequence[str],
    peers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring. `peers` has
    results of some movers, by name.
    """
    found = [
        _result(measured, mover, case, peers=peers.get(mover, ()))
        for mover in movers
        if mover in measured.movers
        for case in measured.cases
    ]
    return (*found, *_handoff_results(handoffs), *busy_results(measured.background))


def warnings(measured: KvMeasured, handoffs: Sequence[Handoffs] = ()) -> list[str]:
    """Returns a line for each reason not to trust the results."""
    lines = [missing.warning for missing in measured.missing]
    if "memcpy" in measured.movers and all(key.way != COMPILED for key in measured.seconds):
        lines.append("no C compiler works here: memcpy is called from Python, which is slower")
    lines += busy_warning(measured.background)
    for handoff in handoffs:
        if handoff.num_failed:
            lines.append(f"{handoff.num_failed} requests over {handoff.transport} failed")
        absent = [name for name in (*TRANSFER, *PHASES) if not _all_have(handoff, name)]
        if absent:
            told = ", ".join(f"{name}_s" for name in absent)
            lines.append(f"over {handoff.transport} not every timeline has {told}: left out")
    return lines


def _result(measured: KvMeasured, mover: str, case: KvCase, *, peers: Sequence[str]) -> Result:
    figures = [_figure(case, s) for s in _best(measured, mover, case)]
    result = result_of(f"{mover}/{case.name}", [f.value for f in figures], figures[0].unit)
    result = result.beside(
        {peer: _median(measured, peer, case) for peer in peers if peer in measured.movers}
    )
    limit = limit_of(mover)
    if case.is_latency or limit not in measured.movers:
        return result
    return result.limited(_median(measured, limit, case))


def _median(measured: KvMeasured, mover: str, case: KvCase) -> float:
    return statistics.median(_figure(case, s).value for s in _best(measured, mover, case))


def _best(measured: KvMeasured, mover: str, case: KvCase) -> tuple[float, ...]:
    """Returns the times of a mover's fastest way."""
    ways = [
        runs for key, runs in measured.seconds.items() if (key.mover, key.case) == (mover, case)
    ]
    return min(ways, key=statistics.median)


def _figure(case: KvCase, seconds: float) -> Figure:
    if case.is_latency:
        return Figure(seconds * 1e6, "µs")
    return Figure(case.num_bytes / seconds / GIB, "GiB/s")


def _handoff_results(handoffs: Sequence[Handoffs]) -> Iterator[Result]:
    for handoff in handoffs:
        shares = list(_hidden(handoff)) if _all_have(handoff, *TRANSFER) else []
        if shares:
            yield result_of(f"hidden_share/{handoff.transport}", shares, "share")
    for prefix, names in (("", TRANSFER), (f"{AFTER_HANDOFF}/", PHASES)):
        for handoff in handoffs:
            for name in names:
                if _all_have(handoff, name):
                    means_ms = [
                        1e3 * statistics.mean(timeline[name] for timeline in timelines)
                        for timelines in handoff.repetitions
                    ]
                    yield result_of(f"{prefix}{name}/{handoff.transport}", means_ms, "ms")


def _hidden(handoff: Handoffs) -> Iterator[float]:
    for timelines in handoff.repetitions:
        transfer_s, exposed_s = (
            fsum(timeline[name] for timeline in timelines) for name in TRANSFER
        )
        if transfer_s > 0:
            yield 1 - exposed_s / transfer_s


def _all_have(handoff: Handoffs, *names: str) -> bool:
    timelines = [timeline for run in handoff.repetitions for timeline in run]
    return bool(timelines) and all(name in t for t in timelines for name in names)
