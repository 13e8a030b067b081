"""Runs `bench fluid` on real deployments: closed loops on all, then streams beside prompts.

Times are taken at one client in this process. It shares the cores with what it measures, and so do
the gateways. Each worker has one compute thread.
"""

import asyncio
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp
import uvloop

from bench.client.answers import Answer, Endpoint, Failure, request_body
from bench.client.arrivals import arrival_times_s
from bench.client.http import http_session
from bench.client.load import RequestsFailed, whole
from bench.common import background
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.waiting import pause
from bench.fluid.plan import (
    COMPARED,
    LOAD,
    POOLS,
    WALLS,
    BoundSetting,
    FluidDeployment,
    FluidPart,
    FluidPlan,
    TokenMix,
    bound_s,
    order_of,
    starts_s,
    stream_order_of,
)
from bench.fluid.results import FluidRun, MixRun, StreamsRun
from bench.lab.streams import (
    FAILED_PAUSE_S,
    REQUEST_TIMEOUT_S,
    StreamsApart,
    bodies,
    linked_checkpoint,
    window_of,
)
from bench.processes.serving import ServedDeployment, serving
from bench.serve.plan import ServeTarget
from bench.serve.run import Send, ServeClient
from engine.clock import MonotonicClock

WARM_UP_S = 1.0
NUM_ALONE = 3  # prompts that are timed one by one
MAX_ARRIVALS = 10_000


@dataclass(frozen=True, slots=True)
class _Server:
    """A deployment and its client."""

    served: ServedDeployment
    send: Send
    model: str
    workers: tuple[int, ...]  # sessions

    def worker_seconds(self) -> list[float]:
        return [background.session_seconds(session) for session in self.workers]


@dataclass(frozen=True, slots=True)
class FluidMeasured:
    """All runs, and the figures on which the second part rests."""

    runs: tuple[FluidRun, ...]
    pace: Mapping[str, float]


def measure(plan: FluidPlan, say: Say = say_nothing) -> FluidMeasured:
    """Carries out the plan. Raises ServerFailed, RequestsFailed, StreamsApart and
    ServerUnreachable.
    """
    with ExitStack() as stack:
        checkpoint = stack.enter_context(linked_checkpoint(plan.shape, seed=plan.seed))
        bench = _Bench(plan, checkpoint, stack, say)
        found: FluidMeasured = uvloop.run(bench.measure())
    return found


class _Bench:
    """Starts deployments, and sends the requests of a plan to them."""

    def __init__(self, plan: FluidPlan, checkpoint: Path, stack: ExitStack, say: Say) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._stack = stack
        self._say = say
        self._vocab = plain_token_ids(checkpoint)
        self._clock = MonotonicClock()
        self._servers: dict[FluidDeployment, _Server] = {}

    async def measure(self) -> FluidMeasured:
        """Runs both parts."""
        runs: list[FluidRun] = []
        pace: Mapping[str, float] = {}
        has_mixes = FluidPart.MIXES in self._plan.parts
        async with http_session(REQUEST_TIMEOUT_S) as session:
            for deployment in COMPARED:
                if has_mixes or deployment is not FluidDeployment.MIXED:
                    await self._start(session, deployment)
            if has_mixes:
                runs += await self._play_mixes()
            if FluidPart.BOUND in self._plan.parts:
                pace, found = await self._run_streams(session)
                runs += found
        return FluidMeasured(tuple(runs), pace)

    async def _start(
        self,
        session: aiohttp.ClientSession,
        deployment: FluidDeployment,
        tpot_bound_s: float | None = None,
    ) -> None:
        """Starts a deployment and warms it up. The loop stands still until it serves."""
        self._say(f"starting: {deployment}")
        options = {**POOLS[deployment], "--threads": 1, "--weights": "int8"}
        environment = dict(WALLS) if deployment is FluidDeployment.WALLED else {}
        if tpot_bound_s is not None:
            environment["BATON_ROUTER__SLO_TPOT_S"] = f"{tpot_bound_s:.6f}"
        served = self._stack.enter_context(serving(self._checkpoint, options, environment))
        client = ServeClient(session, ServeTarget(served.url), self._clock)
        model = await client.first_model()
        workers = tuple(served.services("worker"))
        self._servers[deployment] = _Server(served, client.send, model, workers)
        await self._loop(deployment, self._plan.mixes[0], "warm-up", (0.0, WARM_UP_S))

    # ------------------------------------------------------------ mixes

    async def _play_mixes(self) -> list[MixRun]:
        plan, runs = self._plan, []
        for repeat in range(plan.num_repeats):
            for mix, deployment in order_of(plan, repeat):
                before = background.read(self._sessions())
                window_s = mix.window_s(plan.window_s)
                times_s = (plan.ramp_s, window_s)
                begin_s, found, busy = await self._loop(deployment, mix, str(repeat), times_s)
                share = background.share_of_others(before, background.read(self._sessions()))
                run = MixRun(
                    mix.name,
                    deployment,
                    repeat,
                    begin_s,
                    begin_s + window_s,
                    found,
                    busy,
                    share,
                )
                if not run.requests_per_s:
                    failures = [one for one in found if isinstance(one, Failure)]
                    raise RequestsFailed(f"all requests of {mix.name} to {deployment}", failures)
                runs.append(run)
                self._say(
                    f"repetition {repeat + 1} of {plan.num_repeats}, {mix.name} on {deployment}:"
                    f" {run.requests_per_s:.2f}/s, workers {' '.join(f'{b:.0%}' for b in busy)}"
                )
        return runs

    async def _loop(
        self, deployment: FluidDeployment, mix: TokenMix, name: str, times_s: tuple[float, float]
    ) -> tuple[float, tuple[Answer | Failure, ...], tuple[float, ...]]:
        """Plays a mix in a closed loop, for a ramp and a window.

        Returns the window's begin, all results, and the cores that each worker used in the window.
        """
        server, (ramp_s, window_s) = self._servers[deployment], times_s
        rng = Random(f"{self._plan.seed}/{mix.name}/{deployment}/{name}")
        begin_s = self._clock.now_s() + ramp_s
        end_s = begin_s + window_s
        found: list[Answer | Failure] = []

        async def client(start_s: float) -> None:
            await pause(start_s)
            while (now_s := self._clock.now_s()) < end_s:
                lengths = mix.lengths_at(now_s - begin_s, self._plan.phase_s)
                found.append(result := await server.send(self._body(lengths, server.model, rng)))
                if isinstance(result, Failure):  # or a refused client would repeat without a pause
                    await pause(FAILED_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for start_s in starts_s(self._plan.num_clients, ramp_s):
                group.create_task(client(start_s))
            await pause(ramp_s)
            before_s, read_s = server.worker_seconds(), self._clock.now_s()
            await pause(end_s - self._clock.now_s())
            took_s = self._clock.now_s() - read_s
            after_s = server.worker_seconds()
        busy = tuple((b - a) / took_s for a, b in zip(before_s, after_s, strict=True))
        return begin_s, tuple(found), busy

    def _body(self, lengths: tuple[int, int], model: str, rng: Random) -> bytes:
        input_len, output_len = lengths
        return request_body(
            Endpoint.COMPLETIONS,
            rng.choices(self._vocab, k=input_len),
            model=model,
            output_len=output_len,
            temperature=0.0,
        )

    # ------------------------------------------------------------ streams beside prompts

    async def _run_streams(
        self, session: aiohttp.ClientSession
    ) -> tuple[Mapping[str, float], list[StreamsRun]]:
        plan = self._plan
        pace_s, prompt_s = await self._pace()
        tpot_bound_s, rate_per_s = bound_s(pace_s), LOAD / prompt_s
        self._say(f"bound {1e3 * tpot_bound_s:.1f} ms, {rate_per_s:.2f} prompts/s")
        await self._start(session, FluidDeployment.BOUND, tpot_bound_s)
        runs = []
        for repeat in range(plan.num_repeats):
            for setting in stream_order_of(plan, repeat):
                self._say(f"repetition {repeat + 1} of {plan.num_repeats}: streams on {setting}")
                arrivals = self._arrivals(rate_per_s, repeat) if setting.has_prompts else iter(())
                runs.append(await self._beside(setting, arrivals, repeat))
        pace = {
            "pace_tpot_s": pace_s,
            "prompt_s": prompt_s,
            "tpot_bound_s": tpot_bound_s,
            "prompts_per_s": rate_per_s,
        }
        return pace, runs

    async def _pace(self) -> tuple[float, float]:
        """Measures the TPOT of streams without prompts, and the time of one prompt; medians.

        On walled pools: of fluid ones both workers would decode, a pace that no prompt may disturb.
        """
        server = self._servers[FluidDeployment.WALLED]
        streams, prompts = self._bodies(server, "pace")
        alone = whole(
            await asyncio.gather(
                *(server.send(next(streams)) for _ in range(self._plan.streams.at_once))
            )
        )
        pace_s = statistics.median(one.tpot_s for one in alone if one.tpot_s is not None)
        singles = whole([await server.send(next(prompts)) for _ in range(NUM_ALONE)])
        return pace_s, statistics.median(one.e2e_s for one in singles)

    def _bodies(self, server: _Server, name: str) -> tuple[Iterator[bytes], Iterator[bytes]]:
        """Returns streams and prompts without end; `name` keeps them apart from others."""
        rng = Random(f"{self._plan.seed}/{name}")
        streams, prompts = (
            bodies(ask, self._vocab, model=server.model, rng=rng)
            for ask in (self._plan.streams, self._plan.prompts)
        )
        return streams, prompts

    def _arrivals(self, rate_per_s: float, repeat: int) -> Iterator[float]:
        """Yields the times of a repetition's prompts, the same for all settings."""
        rng = Random(f"{self._plan.seed}/arrivals/{repeat}")
        return iter(arrival_times_s(rate_per_s, MAX_ARRIVALS, burstiness=1.0, rng=rng))

    async def _beside(
        self, setting: BoundSetting, arrivals: Iterator[float], repeat: int
    ) -> StreamsRun:
        server = self._servers[setting.deployment]
        streams, prompts = self._bodies(server, f"{setting}/{repeat}")
        at_once = [next(streams) for _ in range(self._plan.streams.at_once)]
        before = background.read(self._sessions())
        answers, others = await run_beside_arrivals(
            server.send, at_once, prompts, arrivals, now_s=self._clock.now_s
        )
        share = background.share_of_others(before, background.read(self._sessions()))
        begin_s, end_s = window_of(answers)
        if begin_s >= end_s:
            raise StreamsApart(f"{setting}: the streams did not run at the same time")
        return StreamsRun(setting, repeat, answers, tuple(others), share)

    def _sessions(self) -> list[int]:
        services = [
            session
            for one in self._servers.values()
            for session in (one.served.pid, *one.served.sessions())
        ]
        return [os.getsid(0), *services]


async def run_beside_arrivals(
    send: Send,
    streams: Sequence[bytes],
    prompts: Iterator[bytes],
    arrivals: Iterator[float],
    *,
    now_s: Callable[[], float],
) -> tuple[tuple[Answer, ...], list[Answer | Failure]]:
    """Runs all streams, and sends prompts at their times, counted from now, until all streams end.

    Waits for the prompts that were sent. Raises RequestsFailed if a stream fails.
    """
    start_s = now_s()
    ended = asyncio.Event()
    sent: list[asyncio.Task[Answer | Failure]] = []

    async def arrive(group: asyncio.TaskGroup) -> None:
        for due_s in arrivals:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, start_s + due_s - now_s()))
            if ended.is_set():
                return
            sent.append(group.create_task(send(next(prompts))))

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(send(body)) for body in streams]
        group.create_task(arrive(group))
        results = await asyncio.gather(*running)
        ended.set()
    return whole(results), [task.result() for task in sent]
