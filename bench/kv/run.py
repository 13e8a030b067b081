"""Measures how fast KV blocks move: starts all movers, has them move in turn, ends them.

Before the first measurement all movers are open and have moved every case once, verified byte by
byte. Then every repetition measures every way of every mover with every case once. Each repetition
has an order of its own, so that other load affects all movers alike. While one mover works, all
others wait in system calls.

An open mover holds a pool of 96 MiB at each end; Baton's movers hold one for each block size. All
movers together hold 3 GiB.
"""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.common.background import BusyWatch
from bench.common.progress import Say, say_nothing
from bench.common.report import Missing
from bench.kv.movers import Mover, NotMovable, WrongBytes, mover_of, ways_of
from bench.kv.plan import KvPlan, cases_of, order_of, pulls_of
from bench.kv.results import KvMeasured, TimeKey
from bench.processes.driven import DrivenFailed

REQUIRED = ("shm", "zmq", "memcpy", "tcp")  # these work on every machine
WARM_UP = -1  # not a repetition: its blocks are used nowhere else
IDLE_CHECK_S = 0.3


@dataclass(slots=True)
class Field:
    """The movers that still run, by name. A mover that fails is removed."""

    movers: dict[str, Mover]
    ways: list[tuple[str, str]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def drop(self, name: str, error: Exception) -> None:
        """Removes a failed mover. Raises the error if the mover is required."""
        if name in REQUIRED:
            raise error
        mover = self.movers.pop(name, None)
        if mover is not None:
            mover.close()
        self.ways = [(other, way) for other, way in self.ways if other != name]
        self.missing.append(Missing(name, _reason(error)))

    def sessions(self) -> list[int]:
        """Session ids of all processes that still run."""
        processes = [process for mover in self.movers.values() for process in mover.processes]
        return [process.session for process in processes if process.session]


def measure(plan: KvPlan, say: Say = say_nothing) -> KvMeasured:
    """Carries out the plan, except its handoffs.

    Raises DrivenFailed and WrongBytes if shared memory, ZeroMQ or one of their limits fails. Any
    other mover that fails is reported as missing.
    """
    with ExitStack() as stack:
        movers = Field({})
        versions = _open_all(movers, plan, stack, say)
        say("moving everything once, and comparing the bytes")
        _verify_all(movers, plan)
        seconds: dict[TimeKey, list[float]] = {}
        busy = BusyWatch(movers.sessions)
        for repeat in range(plan.num_repeats):
            say(f"repetition {repeat + 1} of {plan.num_repeats}")
            with busy.repetition(idle_s=IDLE_CHECK_S):
                for key, median_s in _repetition(movers, plan, repeat):
                    seconds.setdefault(key, []).append(median_s)
        return KvMeasured(
            seconds={
                key: tuple(runs) for key, runs in seconds.items() if key.mover in movers.movers
            },
            background=tuple(busy.shares),
            versions=versions,
            missing=tuple(movers.missing),
        )


def _open_all(movers: Field, plan: KvPlan, stack: ExitStack, say: Say) -> dict[str, str]:
    """Starts all movers at once and opens them one by one; returns the versions they report."""
    peers = [peer.name for peer in plan.peers if peer.name != "nixl"]  # nixl is a limit
    for name in (*plan.ours, *plan.limits, *peers):
        try:
            mover = mover_of(name, plan)
        except NotMovable as error:
            movers.drop(name, error)
            continue
        movers.movers[name] = mover
        stack.callback(mover.close)
        mover.start()
    versions = {}
    for name, mover in list(movers.movers.items()):
        say(f"opening {name}")
        try:
            facts = mover.open(plan)
            movers.ways += ways_of(mover, facts)
        except DrivenFailed as error:
            movers.drop(name, error)
            continue
        if facts.get("version"):
            versions[name] = str(facts["version"])
    return versions


def _verify_all(movers: Field, plan: KvPlan) -> None:
    for name, way in list(movers.ways):
        for case in cases_of(plan):
            if name not in movers.movers:
                break
            try:
                movers.movers[name].verify(way, case, pulls_of(plan, case, WARM_UP)[0])
            except (DrivenFailed, WrongBytes) as error:
                movers.drop(name, error)


def _repetition(movers: Field, plan: KvPlan, repeat: int) -> Iterator[tuple[TimeKey, float]]:
    """The median seconds of each case's pulls."""
    pulls = {case: pulls_of(plan, case, repeat) for case in cases_of(plan)}
    for name, way, case in order_of(plan, movers.ways, repeat):
        mover = movers.movers.get(name)
        if mover is None:
            continue
        try:
            seconds = mover.move(way, case, pulls[case])
        except DrivenFailed as error:
            movers.drop(name, error)
            continue
        yield TimeKey(name, way, case), statistics.median(seconds)


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, DrivenFailed) else str(error)
