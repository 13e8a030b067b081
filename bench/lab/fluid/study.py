"""Compares fluid pools with walled pools and mixed workers, on real deployments or simulated.

A real deployment has one gateway and two workers with one compute thread each:

    fluid    1 prefill + 1 decode worker; an idle worker also does the work of the other role
    walled   1 prefill + 1 decode worker; each does the work of its own role only
    mixed    2 mixed workers

**Mixes.** All deployments run all the time, and all but one are idle. Each repetition plays all
mixes in a random order. It plays each mix on all deployments one after the other, also in a random
order. So the runs of each ratio follow each other directly.

**Bound.** First, the TPOT of a few streams without prompts and the time of one prompt are measured
on `walled`. Then a deployment `bound` starts, with fluid pools and `SLACK` times this TPOT as
`router.slo_tpot_s`. On `bound` and on `walled`, streams decode first without prompts, then while
prompts arrive. The prompts are a Poisson process at `LOAD` times the rate of one worker. No two
prompts share a prefix, so caches have no effect.

Times are measured by one client in this process. The client and the gateways share the cores with
the workers. `bench.lab.fluid.simulated` describes `--simulated`.
"""

import asyncio
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Self

import aiohttp
import typer
import uvloop

from bench.client.answers import Answer, Failure
from bench.client.arrivals import arrival_times_s
from bench.client.load import RequestsFailed, SloBounds, whole
from bench.client.stream import http_session
from bench.common import background
from bench.common.command import RepeatOption, Say
from bench.common.prompts import plain_token_ids
from bench.common.report import Goals, Scalar
from bench.common.waiting import pause
from bench.lab.elastic import TurningLoad
from bench.lab.experiment import Experiment, Findings, ShapeOption, check_lengths, rounds
from bench.lab.fluid import simulated as simulation
from bench.lab.fluid.figures import (
    BOUND,
    COMPARED,
    FLUID,
    GOALS,
    MIXED,
    RAMP_S,
    STREAM_ARMS,
    WALLED,
    WINDOW_S,
    FluidMeasured,
    MixRun,
    TokenMix,
    mixes_of,
    parts_of,
    results,
    starts_s,
    warnings,
)
from bench.lab.streams import (
    FAILED_PAUSE_S,
    REQUEST_TIMEOUT_S,
    BesideRun,
    LiveServer,
    StreamAsk,
    bodies,
    body_of,
    linked_checkpoint,
    live_server,
    our_sessions,
    run_beside_arrivals,
)
from bench.processes.deployment import serving
from bench.simulator.cluster import SimulatedPools
from bench.simulator.goodput import ATTAINMENT
from bench.simulator.hardware import hardware_named
from engine.clock import MonotonicClock
from engine.config import PoolsConfig

MIXES, GOODPUT = "mixes", "goodput"
LOADS = ("synthetic", "turning")
SLACK = 1.25  # the bound on TPOT, as a multiple of the TPOT of streams without prompts
LOAD = 0.8  # rate of the prompts, as a share of the rate that one worker can compute
WARM_UP_S = 1.0
NUM_ALONE = 3  # number of prompts that are timed one by one
MAX_ARRIVALS = 10_000
_SEPARATE: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1}
POOLS: Mapping[str, Mapping[str, Scalar]] = {  # options of `baton serve` for each deployment
    FLUID: _SEPARATE,
    WALLED: _SEPARATE,
    MIXED: {"--mixed": 2},
    BOUND: _SEPARATE,
}
WALLS = {"BATON_POOLS__FLUID": "false"}
QUICK_REQUESTS = 150
QUICK_WINDOW_S = 3.0
CHUNKS = (128, 256, 512)
TURNS = TurningLoad(4, 30.0)
QUICK_CHUNKS = (256,)
QUICK_TURNS = TurningLoad(2, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidStudy(Experiment):
    """Compare fluid pools with walled and mixed ones, on this machine or simulation."""

    NAME: ClassVar = "fluid"
    QUICK: ClassVar = "Few settings, once: under a minute."
    GOALS: ClassVar = GOALS

    shape: ShapeOption = "88m"
    mixes: Annotated[
        str, typer.Option(help="Tokens in and out of requests; `turning` alternates.")
    ] = "1024/16,256/64,64/256,turning"
    parts: Annotated[
        str | None, typer.Option(help="Out of: mixes, bound; simulated: mixes, goodput.")
    ] = None
    clients: Annotated[int, typer.Option(min=1, help="Of a closed loop.")] = 8
    window_s: Annotated[
        float, typer.Option(min=1.0, help="Measured part of a loop, for each of its phases.")
    ] = WINDOW_S
    phase_s: Annotated[float, typer.Option(min=0.5, help="Phase of the turning mix.")] = 2.5
    streams: Annotated[int, typer.Option(min=1, help="Streams beside prompts.")] = 4
    stream_output: Annotated[int, typer.Option(min=8, help="Output tokens of each.")] = 640
    prompt_input: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024
    prompt_output: Annotated[int, typer.Option(min=1, help="Tokens that answer it.")] = 1
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Simulate a cluster; measure nothing.")
    ] = False
    trace: Annotated[
        list[str] | None,
        typer.Option(help=f"Simulated load: a file or {', '.join(LOADS)}; repeatable."),
    ] = None
    hardware: Annotated[str, typer.Option(help="A simulated profile.")] = "h200-qwen3-32b-tp2"
    prefill: Annotated[int, typer.Option(min=1, help="Simulated prefill workers.")] = 6
    decode: Annotated[int, typer.Option(min=1, help="Simulated decode workers.")] = 2
    requests: Annotated[
        int, typer.Option(min=2, help="Simulate the first requests of a trace.")
    ] = 1000
    stretch: Annotated[float, typer.Option(min=1.01, help="Of simulated steps by prompts.")] = (
        PoolsConfig().stretch
    )
    slo_ttft_ms: Annotated[float, typer.Option(min=1.0, help="Simulated bound.")] = 5000.0
    slo_tpot_ms: Annotated[float, typer.Option(min=1.0, help="Simulated bound.")] = 25.0
    repeat: RepeatOption = 6

    def __post_init__(self) -> None:
        """Raises ConfigError for wrong mixes or parts, or if a request exceeds the model's
        context.
        """
        lengths = [each for mix in mixes_of(self.mixes) for each in mix.phases]
        parts_of(self.parts, (MIXES, GOODPUT) if self.simulated else (MIXES, BOUND))
        if not self.simulated:
            ask = (self.streams_asked, self.prompts_asked)
            lengths += [(one.input_len, one.output_len) for one in ask]
            check_lengths(self.shape, *lengths)

    @property
    def report_name(self) -> str:
        """Returns the name of the report, which differs for simulations."""
        return "fluid_simulated" if self.simulated else self.NAME

    @property
    def goals(self) -> Goals:
        """Returns the goals of the ratios."""
        return simulation.GOALS if self.simulated else self.GOALS

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        if self.simulated:
            return (
                f"simulated: {self.prefill + self.decode} × {self.hardware}, fluid"
                f" {self.prefill} + {self.decode} beside walled splits and mixed workers"
            )
        return f"two workers of one thread, {self.shape}, {self.clients} clients"

    @property
    def streams_asked(self) -> StreamAsk:
        """Returns the lengths and the number of the streams in the part `bound`."""
        return StreamAsk(self.streams, 64, self.stream_output)

    @property
    def prompts_asked(self) -> StreamAsk:
        """Returns the lengths of the prompts that arrive while the streams run."""
        return StreamAsk(1, self.prompt_input, self.prompt_output)

    def has(self, part: str) -> bool:
        """Returns True if this part is carried out."""
        known = (MIXES, GOODPUT) if self.simulated else (MIXES, BOUND)
        return part in parts_of(self.parts, known)

    @property
    def ramp_s(self) -> float:
        """Returns the seconds in which the clients of a loop begin."""
        return min(RAMP_S, self.window_s / 2)

    def quick(self) -> Self:
        """Returns a study that takes under a minute: a simulation, or one repetition of the first
        and the last steady mix.
        """
        if self.simulated:
            return replace(self, requests=min(self.requests, QUICK_REQUESTS), is_quick=True)
        steady = [text.strip() for text in self.mixes.split(",") if "/" in text]
        return replace(
            self,
            mixes=",".join(dict.fromkeys((steady[0], steady[-1]))),
            parts=MIXES,
            window_s=min(self.window_s, QUICK_WINDOW_S),
            repeat=1,
            is_quick=True,
        )

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ServerFailed, RequestsFailed, StreamsApart, ServerUnreachable and
        TraceError.
        """
        if not self.simulated:
            measured = self.run(say)
            return Findings(results(measured), warnings(measured), config=measured.pace)
        plan = self._simulated()
        config: dict[str, Scalar] = {
            "splits": len(plan.splits),
            "chunks": ",".join(map(str, plan.chunks)),
            "attainment": ATTAINMENT,
            **{f"requests_{name}": len(trace.requests) for name, trace in plan.loads.items()},
        }
        return Findings(simulation.study(plan, say), config=config)

    def _simulated(self) -> simulation.SimulatedFluidPlan:
        pools = SimulatedPools(self.prefill, self.decode)
        turns = QUICK_TURNS if self.is_quick else TURNS
        pools_of = simulation.splits_near if self.is_quick else simulation.splits_of_all
        return simulation.SimulatedFluidPlan(
            hardware_named(self.hardware),
            simulation.loads_of(self.trace or LOADS, self.requests, turns, pools.total, self.seed)
            if self.has(GOODPUT)
            else {},
            pools,
            splits=pools_of(pools),
            chunks=QUICK_CHUNKS if self.is_quick else CHUNKS,
            slo=SloBounds.from_ms(self.slo_ttft_ms, self.slo_tpot_ms),
            loops=simulation.Loops(
                mixes_of(self.mixes) if self.has(MIXES) else (),
                self.clients,
                window_s=self.window_s,
                phase_s=self.phase_s,
            ),
            stretch=self.stretch,
            seed=self.seed,
        )

    def run(self, say: Say) -> FluidMeasured:
        """Runs both parts of the study on real deployments."""
        with ExitStack() as stack:
            checkpoint = stack.enter_context(linked_checkpoint(self.shape, seed=self.seed))
            found: FluidMeasured = uvloop.run(_Bench(self, checkpoint, stack, say).run())
        return found


class _Bench:
    """Starts deployments, and sends the requests of a study to them."""

    def __init__(self, study: FluidStudy, checkpoint: Path, stack: ExitStack, say: Say) -> None:
        self._study = study
        self._checkpoint = checkpoint
        self._stack = stack
        self._say = say
        self._vocab = plain_token_ids(checkpoint)
        self._clock = MonotonicClock()
        self._servers: dict[str, LiveServer] = {}
        self._found = FluidMeasured()

    async def run(self) -> FluidMeasured:
        """Runs the parts that the study has."""
        has_mixes = self._study.has(MIXES)
        async with http_session(REQUEST_TIMEOUT_S) as session:
            for deployment in COMPARED:
                if has_mixes or deployment != MIXED:
                    await self._start(session, deployment)
            if has_mixes:
                await self._play_mixes()
            if self._study.has(BOUND):
                await self._run_streams(session)
        return self._found

    async def _start(
        self, session: aiohttp.ClientSession, deployment: str, tpot_bound_s: float | None = None
    ) -> None:
        """Starts a deployment and warms it up. Blocks the event loop until the deployment serves
        requests.
        """
        self._say(f"starting: {deployment}")
        options = {**POOLS[deployment], "--threads": 1, "--weights": "int8"}
        environment = dict(WALLS) if deployment == WALLED else {}
        if tpot_bound_s is not None:
            environment["BATON_ROUTER__SLO_TPOT_S"] = f"{tpot_bound_s:.6f}"
        served = self._stack.enter_context(serving(self._checkpoint, options, environment))
        self._servers[deployment] = await live_server(served, session)
        [first, *_] = mixes_of(self._study.mixes)
        await self._loop(deployment, first, "warm-up", (0.0, WARM_UP_S))

    # ------------------------------------------------------------ mixes

    async def _play_mixes(self) -> None:
        study = self._study
        mixes = mixes_of(study.mixes)
        for repeat, mix in rounds(mixes, study.repeat, study.seed, self._say):
            rng = Random(f"{study.seed}/{mix}/{repeat}")
            for deployment in rng.sample(COMPARED, k=len(COMPARED)):
                before = background.read(our_sessions(self._servers))
                window_s = mix.window_s(study.window_s)
                times_s = (study.ramp_s, window_s)
                begin_s, found, busy = await self._loop(deployment, mix, str(repeat), times_s)
                share = background.share_of_others(
                    before, background.read(our_sessions(self._servers))
                )
                run = MixRun(
                    mix.name, deployment, repeat, begin_s, begin_s + window_s, found, busy, share
                )
                if not run.requests_per_s:
                    failures = [one for one in found if isinstance(one, Failure)]
                    raise RequestsFailed(f"all requests of {mix} to {deployment}", failures)
                self._found.mixes.append(run)
                used = " ".join(f"{one:.0%}" for one in busy)
                self._say(f"{mix} on {deployment}: {run.requests_per_s:.2f}/s, workers {used}")

    async def _loop(
        self, deployment: str, mix: TokenMix, name: str, times_s: tuple[float, float]
    ) -> tuple[float, tuple[Answer | Failure, ...], tuple[float, ...]]:
        """Plays a mix in a closed loop, for a ramp and a window.

        Returns the begin of the window, all results, and the number of cores that each worker used
        in the window.
        """
        server, (ramp_s, window_s) = self._servers[deployment], times_s
        rng = Random(f"{self._study.seed}/{mix.name}/{deployment}/{name}")
        begin_s = self._clock.now_s() + ramp_s
        end_s = begin_s + window_s
        found: list[Answer | Failure] = []

        async def client(start_s: float) -> None:
            await pause(start_s)
            while (now_s := self._clock.now_s()) < end_s:
                lengths = mix.lengths_at(now_s - begin_s, self._study.phase_s)
                body = body_of(*lengths, self._vocab, model=server.model, rng=rng)
                found.append(result := await server.send(body))
                # Without this pause, a refused client would send its next request at once.
                if isinstance(result, Failure):
                    await pause(FAILED_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for start_s in starts_s(self._study.clients, ramp_s):
                group.create_task(client(start_s))
            await pause(ramp_s)
            before_s, read_s = server.worker_seconds(), self._clock.now_s()
            await pause(end_s - self._clock.now_s())
            took_s = self._clock.now_s() - read_s
            after_s = server.worker_seconds()
        busy = tuple((b - a) / took_s for a, b in zip(before_s, after_s, strict=True))
        return begin_s, tuple(found), busy

    # ------------------------------------------------------------ streams beside prompts

    async def _run_streams(self, session: aiohttp.ClientSession) -> None:
        study = self._study
        pace_s, prompt_s = await self._pace()
        tpot_bound_s, rate_per_s = SLACK * pace_s, LOAD / prompt_s
        self._say(f"bound {1e3 * tpot_bound_s:.1f} ms, {rate_per_s:.2f} prompts/s")
        await self._start(session, BOUND, tpot_bound_s)
        for repeat, arm in rounds(STREAM_ARMS, study.repeat, study.seed, self._say):
            has_prompts = not arm.endswith("_idle")
            arrivals = self._arrivals(rate_per_s, repeat) if has_prompts else iter(())
            self._found.streams.append(await self._beside(arm, arrivals, repeat))
        self._found.pace.update(
            pace_tpot_s=pace_s,
            prompt_s=prompt_s,
            tpot_bound_s=tpot_bound_s,
            prompts_per_s=rate_per_s,
        )

    async def _pace(self) -> tuple[float, float]:
        """Measures the TPOT of streams without prompts, and the time of one prompt. Returns the
        medians.

        Uses walled pools. In fluid pools both workers would decode the streams, at a pace that is
        impossible while prompts arrive.
        """
        server = self._servers[WALLED]
        streams, prompts = self._bodies(server, "pace")
        num_streams = self._study.streams_asked.at_once
        alone = whole(
            await asyncio.gather(*(server.send(next(streams)) for _ in range(num_streams)))
        )
        pace_s = statistics.median(one.tpot_s for one in alone if one.tpot_s is not None)
        singles = whole([await server.send(next(prompts)) for _ in range(NUM_ALONE)])
        return pace_s, statistics.median(one.e2e_s for one in singles)

    def _bodies(self, server: LiveServer, name: str) -> tuple[Iterator[bytes], Iterator[bytes]]:
        """Returns two endless iterators: requests of streams, and prompts. `name` makes the prompts
        unique.
        """
        rng = Random(f"{self._study.seed}/{name}")
        streams, prompts = (
            bodies(ask, self._vocab, model=server.model, rng=rng)
            for ask in (self._study.streams_asked, self._study.prompts_asked)
        )
        return streams, prompts

    def _arrivals(self, rate_per_s: float, repeat: int) -> Iterator[float]:
        """Yields the arrival times of a repetition's prompts. They are the same for all arms."""
        rng = Random(f"{self._study.seed}/arrivals/{repeat}")
        return iter(arrival_times_s(rate_per_s, MAX_ARRIVALS, burstiness=1.0, rng=rng))

    async def _beside(self, arm: str, arrivals: Iterator[float], repeat: int) -> BesideRun:
        server = self._servers[arm.removesuffix("_idle")]
        streams, prompts = self._bodies(server, f"{arm}/{repeat}")
        at_once = [next(streams) for _ in range(self._study.streams_asked.at_once)]
        sessions = our_sessions(self._servers)
        before = background.read(sessions)
        answers, others = await run_beside_arrivals(
            server.send, at_once, prompts, arrivals, now_s=self._clock.now_s
        )
        share = background.share_of_others(before, background.read(sessions))
        return BesideRun(arm, answers, tuple(others), others_share=share, repeat=repeat).together()
