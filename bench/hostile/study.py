"""`baton bench hostile`: runs hostile clients and honest clients on one real deployment.

A prefill and a decode worker run behind one gateway. Honest clients stream answers all the time.
Meanwhile, hostile clients attack in three waves:

1. *bodies*: mutated, truncated, nested and random requests (`bench.hostile.corpus`);
2. *slow connections*: heads and bodies that are sent a byte at a time, or never;
3. *disconnects*: clients that disconnect before, during or after their request.

Then an attacker in a process of its own carries out assaults (`bench.hostile.assaults`), one after
the other. The attacker and the honest clients use different API keys.

A part of each wave is sent before the measurement. It fills caches and the allocator's pools. So
memory that grows later shows growth that attackers can cause.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import aiohttp
import msgspec
import typer
import uvloop

from bench.common.command import Say
from bench.common.report import Scalar
from bench.common.waiting import pause
from bench.hostile.assaults import ASSAULTS, AssaultRun, Attacker, private_bytes
from bench.hostile.corpus import ATTACKER_KEY, HONEST_KEY, shots
from bench.hostile.results import (
    CALM,
    HonestReports,
    HostileRun,
    MemorySample,
    Phase,
    complaints,
    results,
    warnings,
)
from bench.hostile.waves import Outcomes, Slow, disconnect, drip, send_bodies
from bench.lab.experiment import Experiment, Findings
from bench.processes.deployment import (
    STEADY_S,
    OperatedDeployment,
    SeenPools,
    ServedDeployment,
    free_port,
    operated,
    settle,
)
from bench.processes.driven import ChildProcess
from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import Clock, MonotonicClock
from engine.errors import ConfigError

CALM_S = 5.0  # seconds in which only the honest clients send requests
WARM_UP_SHARE = 0.1  # share of each wave that is sent before the measurement
# seconds for which slow connections last, unless the server closes them
SLOW_S, QUICK_SLOW_S = 40.0, 5.0
HONEST = "bench.hostile.honest"
# nice value of the hostile clients: the server and the honest clients have priority
LOW_PRIORITY = 10
END_TIMEOUT_S = 10.0
CLIENT_TIMEOUT_S = 30.0
OPTIONS: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1, "--weights": "int8", "--kv-mib": 64}
ENVIRONMENT: Mapping[str, str] = {
    "BATON_GATEWAY__API_KEY": f'["{ATTACKER_KEY}", "{HONEST_KEY}"]',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileStudy(Experiment):
    """Send hostile requests, slow connections, disconnects and assaults beside honest streams.

    The status is 1 after a server error, a leak, a lost service, a long pause or growing memory.
    """

    NAME: ClassVar = "hostile"
    QUICK: ClassVar = "A small part of each wave."

    bodies: Annotated[int, typer.Option(min=1, help="Hostile requests.")] = 50_000
    slow: Annotated[int, typer.Option(min=1, help="Slow connections at once.")] = 2_000
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that leave.")] = 10_000
    streams: Annotated[int, typer.Option(min=1, help="Honest streams beside them.")] = 4
    at_once: Annotated[int, typer.Option(min=1, help="Hostile requests under way.")] = 16
    assault: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(ASSAULTS)}; may be given again. All by default."),
    ] = None
    times: Annotated[int, typer.Option(min=1, help="That each assault is carried out.")] = 4

    def __post_init__(self) -> None:
        """Raises ConfigError if an assault does not exist."""
        if unknown := next((name for name in self.assault or () if name not in ASSAULTS), None):
            raise ConfigError(f"there is no assault {unknown!r}; there are {', '.join(ASSAULTS)}")

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return (
            f"{self.bodies} hostile requests, {self.slow} slow connections and"
            f" {self.disconnects} disconnects beside {self.streams} streams"
        )

    def quick(self) -> Self:
        """Returns a study with a small part of each wave and each assault once. It takes under 50
        s.
        """
        return replace(self, is_quick=True, bodies=1_500, slow=100, disconnects=300, times=1)

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ServerFailed."""
        grpc_port = free_port()
        say("starting 1 + 1 workers")
        with operated(BUNDLED_MODEL, {**OPTIONS, "--grpc-port": grpc_port}, ENVIRONMENT) as served:
            run: HostileRun = uvloop.run(self._measure(served, grpc_port, say))
        found = complaints(run)
        return Findings(results(run), warnings(run), found, is_whole=not found)

    async def _measure(
        self, deployment: OperatedDeployment, grpc_port: int, say: Say
    ) -> HostileRun:
        clock, reports, served = MonotonicClock(), HonestReports(), deployment.served

        def is_whole(seen: SeenPools) -> bool:
            return bool(seen.workers) and seen.is_idle

        async with deployment.connected(CLIENT_TIMEOUT_S) as session:
            storm = _Storm(self, served.url, session, clock, say)
            say("a part of each wave, to warm up")
            await storm.warm_up()
            await settle(deployment, is_whole, clock, steady_s=STEADY_S)
            before = _memory(served)
            services = served.sessions()
            with _honest(served.url, self.streams, reports):
                await storm.run()
            await settle(deployment, is_whole, clock, steady_s=STEADY_S)
            after = _memory(served)
            with _honest(served.url, self.streams, reports):
                for name in self.assault or ASSAULTS:
                    await storm.assault(Attacker(name, self.times, served, grpc_port))
            await settle(deployment, is_whole, clock, steady_s=STEADY_S)
            seen = await deployment.check()
        blocks, leases = seen.leaked
        return HostileRun(
            phases=tuple(storm.phases),
            reports=reports,
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
    """Sends the waves, one after the other."""

    def __init__(
        self,
        study: HostileStudy,
        url: str,
        session: aiohttp.ClientSession,
        clock: Clock,
        say: Say,
    ) -> None:
        self._study = study
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
        """Sends a share of each wave. The requests come from another seed than the measured
        ones.
        """
        study = self._study
        num_bodies, num_left, num_slow = (
            int(WARM_UP_SHARE * num) + 1 for num in (study.bodies, study.disconnects, study.slow)
        )
        seed = study.seed + 1
        await send_bodies(self._session, self._url, shots(num_bodies, seed=seed), study.at_once)
        await disconnect(self._url, num_left, at_once=study.at_once, seed=seed)
        await self._drip(num_slow)

    async def run(self) -> None:
        """Sends all waves and records their outcomes."""
        study = self._study
        os.nice(LOW_PRIORITY)
        with self._phase(CALM):
            await pause(CALM_S)
        with self._phase("bodies"):
            hostile = shots(study.bodies, seed=study.seed)
            self.bodies = await send_bodies(self._session, self._url, hostile, study.at_once)
        with self._phase("slow"):
            self.slow = await self._drip(study.slow)
        with self._phase("disconnects"):
            left = await disconnect(
                self._url, study.disconnects, at_once=study.at_once, seed=study.seed
            )
            self.disconnects = dict(left)

    async def assault(self, attacker: Attacker) -> None:
        """Carries out one assault and records the result. Raises DrivenFailed."""
        await attacker.open()
        with self._phase(attacker.name):
            ends = await attacker.attack()
        self.assaults.append(await attacker.recovered(ends, self._clock))

    async def _drip(self, num: int) -> Slow:
        lasting_s = QUICK_SLOW_S if self._study.is_quick else SLOW_S
        return await drip(self._session, self._url, num, lasting_s=lasting_s, clock=self._clock)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Records the begin and the end of a phase."""
        self._say(name)
        begin_s = self._clock.now_s()
        yield
        self.phases.append(Phase(name, begin_s, self._clock.now_s()))


@contextmanager
def _honest(url: str, num_streams: int, reports: HonestReports) -> Iterator[None]:
    """Runs honest clients during the block, and reads their reports at its end."""
    child = ChildProcess(
        [sys.executable, "-m", HONEST, url, str(num_streams)],
        on_stdout=lambda line: _receive(line, reports),
    )
    try:
        yield
    finally:
        child.close(END_TIMEOUT_S)


def _receive(line: str | None, reports: HonestReports) -> None:
    if line is None:
        return
    told = msgspec.json.decode(line)
    if isinstance(told, str):
        reports.broken.append(told)
    else:
        begin_s, end_s, is_first = told
        (reports.firsts if is_first else reports.gaps).append((begin_s, end_s))


def _memory(served: ServedDeployment) -> dict[str, int]:
    return {kind: private_bytes(served.services(kind)) for kind in ("gateway", "worker")}
