"""Runs `bench hostile`: a real deployment, honest streams, three hostile waves and assaults."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from bench.common.progress import Say, say_nothing
from bench.common.waiting import pause
from bench.hostile.assaulting import AssaultRun, Attacker, private_bytes
from bench.hostile.bodies import shots
from bench.hostile.plan import (
    CALM,
    CALM_S,
    ENVIRONMENT,
    KV_MIB,
    OPTIONS,
    WARM_UP_SHARE,
    HostilePlan,
)
from bench.hostile.waves import Outcomes, Slow, disconnect, drip, send_bodies
from bench.processes.child import ChildProcess
from bench.processes.deployment import STEADY_S, OperatedDeployment, SeenPools, operated, settle
from bench.processes.serving import ServedDeployment, free_port
from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import Clock, MonotonicClock

HONEST = "bench.hostile.honest"
LOW_PRIORITY = 10  # of the hostile clients: the server and the honest clients come first
END_TIMEOUT_S = 10.0
CLIENT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the run, in times of the machine's monotonic clock."""

    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Heard:
    """Reports of the honest clients: gaps of their streams, and broken answers."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)  # waits for first tokens
    broken: list[str] = field(default_factory=list)

    def longest_s(self, phase: Phase) -> float:
        """The longest part of a gap that lay in a phase; 0 without any reported gap."""
        return _longest_s(self.gaps, phase)

    def longest_first_s(self, phase: Phase) -> float:
        """The longest wait for a first token in the phase."""
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
    """The result of a run."""

    phases: tuple[Phase, ...]
    heard: Heard
    bodies: Outcomes
    slow: Slow
    disconnects: dict[str, int]
    memory: MemorySample
    blocks_left: int
    leases_left: int
    num_ended: int  # services that are not the ones that were started
    assaults: tuple[AssaultRun, ...] = ()


def measure(plan: HostilePlan, say: Say = say_nothing) -> HostileRun:
    """Carries out the plan. Raises ServerFailed."""
    grpc_port = free_port()
    options = {**OPTIONS, "--kv-mib": KV_MIB, "--grpc-port": grpc_port}
    say("starting 1 + 1 workers")
    with operated(BUNDLED_MODEL, options, ENVIRONMENT) as deployment:
        run: HostileRun = uvloop.run(_measure(plan, deployment, grpc_port, say))
    return run


async def _measure(
    plan: HostilePlan, deployment: OperatedDeployment, grpc_port: int, say: Say
) -> HostileRun:
    clock, heard, served = MonotonicClock(), Heard(), deployment.served

    def is_whole(seen: SeenPools) -> bool:
        return bool(seen.workers) and seen.is_idle

    async with deployment.connected(CLIENT_TIMEOUT_S) as session:
        storm = _Storm(plan, served.url, session, clock, say)
        say("a part of each wave, to warm up")
        await storm.warm_up()
        await settle(deployment, is_whole, clock, steady_s=STEADY_S)
        before = _memory(served)
        services = served.sessions()
        with _honest(served.url, plan.num_streams, heard):
            await storm.run()
        await settle(deployment, is_whole, clock, steady_s=STEADY_S)
        after = _memory(served)
        with _honest(served.url, plan.num_streams, heard):
            for name in plan.assaults:
                await storm.assault(Attacker(name, plan.times, served, grpc_port))
        await settle(deployment, is_whole, clock, steady_s=STEADY_S)
        seen = await deployment.check()
    blocks, leases = seen.leaked
    return HostileRun(
        phases=tuple(storm.phases),
        heard=heard,
        bodies=storm.bodies,
        slow=storm.slow,
        disconnects=storm.disconnects,
        memory=MemorySample(before, after),
        blocks_left=blocks,
        leases_left=leases,
        num_ended=len(set(services) - set(served.sessions())),
        assaults=tuple(storm.assaults),
    )


class _Storm:
    """The waves, one after the other."""

    def __init__(
        self,
        plan: HostilePlan,
        url: str,
        session: aiohttp.ClientSession,
        clock: Clock,
        say: Say,
    ) -> None:
        self._plan = plan
        self._url = url
        self._session = session
        self._clock = clock
        self._say = say
        self.phases: list[Phase] = []
        self.bodies = Outcomes()
        self.slow = Slow()
        self.disconnects: dict[str, int] = {}
        self.assaults: list[AssaultRun] = []

    async def warm_up(self) -> None:
        """A share of each wave, of another seed."""
        plan = self._plan
        num_bodies, num_left, num_slow = (
            int(WARM_UP_SHARE * num) + 1
            for num in (plan.num_bodies, plan.num_disconnects, plan.num_slow)
        )
        seed = plan.seed + 1
        await send_bodies(self._session, self._url, shots(num_bodies, seed=seed), plan.at_once)
        await disconnect(self._url, num_left, at_once=plan.at_once, seed=seed)
        await self._drip(num_slow)

    async def run(self) -> None:
        """Sends all waves and keeps their outcomes."""
        plan = self._plan
        os.nice(LOW_PRIORITY)
        with self._phase(CALM):
            await pause(CALM_S)
        with self._phase("bodies"):
            hostile = shots(plan.num_bodies, seed=plan.seed)
            self.bodies = await send_bodies(self._session, self._url, hostile, plan.at_once)
        with self._phase("slow"):
            self.slow = await self._drip(plan.num_slow)
        with self._phase("disconnects"):
            left = await disconnect(
                self._url, plan.num_disconnects, at_once=plan.at_once, seed=plan.seed
            )
            self.disconnects = dict(left)

    async def assault(self, attacker: Attacker) -> None:
        """Carries out one assault and keeps how it went. Raises DrivenFailed."""
        await attacker.open()
        with self._phase(attacker.name):
            ends = await attacker.attack()
        self.assaults.append(await attacker.recovered(ends, self._clock))

    async def _drip(self, num: int) -> Slow:
        lasting_s = self._plan.slow_s
        return await drip(self._session, self._url, num, lasting_s=lasting_s, clock=self._clock)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Notes when a phase begins and ends."""
        self._say(name)
        begin_s = self._clock.now_s()
        yield
        self.phases.append(Phase(name, begin_s, self._clock.now_s()))


@contextmanager
def _honest(url: str, num_streams: int, heard: Heard) -> Iterator[None]:
    """Runs honest streams inside the block; their reports are read at its end."""
    child = ChildProcess(
        [sys.executable, "-m", HONEST, url, str(num_streams)],
        on_stdout=lambda line: _hear(line, heard),
    )
    try:
        yield
    finally:
        child.close(END_TIMEOUT_S)


def _hear(line: str | None, heard: Heard) -> None:
    if line is None:
        return
    told = msgspec.json.decode(line)
    if isinstance(told, str):
        heard.broken.append(told)
    else:
        begin_s, end_s, is_first = told
        (heard.firsts if is_first else heard.gaps).append((begin_s, end_s))


def _memory(served: ServedDeployment) -> dict[str, int]:
    return {kind: private_bytes(served.services(kind)) for kind in ("gateway", "worker")}
