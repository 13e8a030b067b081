"""Measures how fast movers move blocks: opens all of them, and has them move in turn.

Before the first measurement all movers are open and have moved every case once, verified byte by
byte. Then every repetition measures every way of every mover with every case once. Each repetition
has an order of its own, so that other load affects all movers alike. While one mover works, all
others wait in system calls.

An open mover holds a pool of 96 MiB at each end; Baton's movers hold one for each block size. All
movers together hold 3 GiB.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.common.background import BusyWatch
from bench.common.progress import Say
from bench.common.report import Missing
from bench.lab.experiment import order_of
from bench.lab.kv.cases import KvCase, KvPulls
from bench.lab.kv.movers import Mover, NotMovable, WrongBytes, ways_of
from bench.processes.driven import DrivenFailed

REQUIRED = ("shm", "zmq", "memcpy", "tcp", "slab")  # these work on every machine
WARM_UP = -1  # not a repetition: its blocks are used nowhere else
IDLE_CHECK_S = 0.3


@dataclass(frozen=True, slots=True)
class TimeKey:
    """The mover, way and case of a time."""

    mover: str
    way: str
    case: KvCase


@dataclass(frozen=True, slots=True)
class KvMeasured:
    """The times of all repetitions."""

    seconds: Mapping[TimeKey, tuple[float, ...]]  # one median for each repetition
    background: tuple[float, ...] = ()  # share of the CPU that others used, by repetition
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()

    @property
    def movers(self) -> list[str]:
        """Names of the movers that were measured."""
        return list(dict.fromkeys(key.mover for key in self.seconds))

    @property
    def cases(self) -> list[KvCase]:
        """The cases that were measured, by block size and number of blocks."""
        cases = dict.fromkeys(key.case for key in self.seconds)
        return sorted(cases, key=lambda case: (case.block_bytes, case.num_blocks))


@dataclass(slots=True)
class MoverContest:
    """The movers that still run, by name. A mover that fails is removed."""

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
        """Session ids of all processes that still run."""
        processes = [process for mover in self.movers.values() for process in mover.processes]
        return [process.session for process in processes if process.session]

    def open(self, movers: Mapping[str, Callable[[], Mover]], stack: ExitStack, say: Say) -> None:
        """Starts all movers at once and opens them one by one."""
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
        """Has every way of every mover move every case once, and compares the bytes."""
        for name, way in [*self.ways]:
            for case in self.pulls.cases:
                if name not in self.movers:
                    break
                try:
                    self.movers[name].verify(way, case, self.pulls.of(case, WARM_UP)[0])
                except (DrivenFailed, WrongBytes) as error:
                    self.drop(name, error)

    def repetition(self, repeat: int) -> Iterator[tuple[TimeKey, float]]:
        """Yields the median seconds of each case's pulls."""
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
    """Measures all movers.

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
