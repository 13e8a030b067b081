"""Runs `bench chaos`: plays requests on a real deployment, first without faults, then with
faults.
"""

import asyncio
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from bench.chaos import netns
from bench.chaos.checker import (
    gaps,
    judge,
    reply_of,
)
from bench.chaos.client import ReconnectingClient, open_loop, undisturbed
from bench.chaos.faults import Cuts, Director, FullDisks, Injector, Orders, RayKills, Signals
from bench.chaos.plan import (
    BREAKS_CONNECTIONS,
    OF_RAY,
    ChaosPlan,
    FaultKind,
    check,
    config_of,
    due_times_s,
    faults_of,
    quick,
)
from bench.chaos.results import (
    ChaosRun,
    LeftBehind,
    Outage,
    complaints,
    has_passed,
    results,
    row_of,
    story,
)
from bench.chaos.services import StoreKills, StoreLeft, WholeRestarts, idle_store, slots_of_store
from bench.chaos.streams import chaos_requests
from bench.common.command import (
    JsonOption,
    Say,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
    say_nothing,
    say_on_stderr,
    values_of,
)
from bench.common.prompts import plain_token_ids
from bench.common.report import report_here, results_of
from bench.common.tables import print_lines
from bench.common.waiting import holds_within, pause
from bench.processes.deployment import (
    STEADY_S,
    OperatedDeployment,
    Options,
    SeenPools,
    free_port,
    operated,
    settle,
)
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient
from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import Clock, MonotonicClock
from engine.messages import Role

# the function that puts each worker into its own network place
PLACES = "bench.chaos.netns:own_places"
REQUEST_TIMEOUT_S = 120.0
REPLACES_ALL = frozenset({FaultKind.RAYLET, FaultKind.EVERYTHING})
# Longest time in seconds in which connections may be refused while all gateways are replaced.
REFUSED_FOR_S = 60.0
# a service that is killed this many seconds after its start does not count as unable to start
STEADY_AFTER_S = 5.0
GONE_WITHIN_S = 60.0
GONE_AFTER_S = 5.0  # seconds in which processes must end that the command does not wait for
WATCH_EVERY_S = 0.5


def measure(plan: ChaosPlan, say: Say = say_nothing) -> ChaosRun:
    """Carries out the plan.

    Raises ServerFailed, ServerUnreachable, NotUndisturbed and StoreUnseen. Raises netns.Unavailable
    if the plan has partitions and this machine or user cannot have a cut network.
    """
    options: Options = {
        "--prefill": plan.prefill,
        # One decode worker is added later by an order. The restarted deployment must have it again.
        "--decode": plan.decode - plan.is_restarted,
        "--weights": "int8",
        "--kv-mib": plan.kv_mib,
        "--kv-transport": plan.kv_transport,
        "--launcher": plan.launcher,
    }
    environment = {
        "BATON_GATEWAY__PROCESSES": str(plan.gateways),
        "BATON_POOLS__STEADY_S": str(STEADY_AFTER_S),
        "BATON_POOLS__SPARES": str(plan.spares),
    }
    if plan.is_restarted:  # the restarted command needs the same port and the same file of orders
        options = {**options, "--port": free_port()}
        environment["BATON_ADMIN__NAME"] = "chaos"
    with ExitStack() as stack:
        if plan.has_store:
            folder = stack.enter_context(TemporaryDirectory(prefix="baton-store-"))
            environment["BATON_STORE__MEMORY_MIB"] = str(plan.store_mib)
            environment["BATON_STORE__DISK"] = folder
        if plan.is_partitioned:
            stack.enter_context(netns.hub())
            options = {**options, "--places": PLACES}
        say(f"starting {plan.prefill} + {plan.decode} workers")
        deployment = stack.enter_context(operated(BUNDLED_MODEL, options, environment))
        run: ChaosRun = uvloop.run(_measure(plan, deployment, say))
    return run


async def _measure(plan: ChaosPlan, deployment: OperatedDeployment, say: Say) -> ChaosRun:
    clock = MonotonicClock()
    whole = partial(is_whole, plan=plan)
    # Without reuse, each new connection may be accepted by another gateway process.
    async with deployment.connected(REQUEST_TIMEOUT_S, reuses_connections=False) as session:
        model = await ServeClient(session, ServeTarget(deployment.url), clock).first_model()
        asked = chaos_requests(
            plan.num_requests, vocab=plain_token_ids(BUNDLED_MODEL), model=model, seed=plan.seed
        )
        refused_for_s = REFUSED_FOR_S if REPLACES_ALL & set(plan.kinds) else 0.0
        client = ReconnectingClient(session, deployment.url, clock, refused_for_s=refused_for_s)
        if plan.is_restarted:
            await deployment.set_pools(plan.prefill, plan.decode)
        await settle(deployment, whole, clock)
        say(f"{len(asked)} requests undisturbed")
        calm = await undisturbed(client, asked)
        say(f"answered in {max(s.ended_s for s in calm) - min(s.sent_s for s in calm):.1f} s")
        await settle(deployment, whole, clock)
        slots = await slots_of_store(session, deployment.url, clock) if plan.has_store else 0.0
        signals, orders = Signals(deployment, clock), Orders(deployment, clock)
        injectors: dict[FaultKind, Injector] = {
            **dict.fromkeys(FaultKind, signals),
            FaultKind.FLIP: orders,
            FaultKind.DRAIN: orders,
            FaultKind.PARTITION: Cuts(),
            FaultKind.DISK_FULL: FullDisks(deployment, clock),
            **dict.fromkeys(OF_RAY, RayKills(deployment, clock)),
            FaultKind.STORE: StoreKills(deployment, clock),
            FaultKind.EVERYTHING: WholeRestarts(deployment, clock),
        }
        director = Director(deployment, injectors, clock, kinds=plan.kinds)
        watch = _Watch(deployment, clock)
        say(f"the same in {plan.duration_s:.0f} s, with faults: {', '.join(plan.kinds)}")
        begun_s = clock.now_s()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.run())
            faults = group.create_task(director.run(faults_of(plan), begun_s))
            streams = await open_loop(client, asked, due_times_s(plan), clock)
            await faults
            await settle(deployment, whole, clock, steady_s=STEADY_S)
            watching.cancel()
        say("looking for what was left behind")
        seen = await deployment.check()
        store_left = StoreLeft()
        if plan.has_store:
            store_left = await idle_store(session, deployment.url, slots, clock)
        processes = await _end(deployment, clock)
    expected = [reply_of(s, ask.num_choices) for s, ask in zip(calm, asked, strict=True)]
    deaths = [f for f in director.injected if f.kind in BREAKS_CONNECTIONS]
    return ChaosRun(
        plan=plan,
        asked=tuple(asked),
        expected=tuple(expected),
        streams=tuple(map(tuple, streams)),
        verdicts=tuple(judge(e, s, deaths) for e, s in zip(expected, streams, strict=True)),
        injected=tuple(sorted(director.injected, key=lambda fault: fault.begun_s)),
        skipped=tuple(director.skipped),
        outages=tuple(watch.outages),
        left=LeftBehind(
            *seen.leaked,
            is_whole=whole(seen),
            store=store_left,
            processes=tuple(processes),
            detail="" if whole(seen) else str(seen),
        ),
        calm_stall_s=max((end - begin for s in calm for begin, end in gaps([s])), default=0.0),
        duration_s=max(s[-1].ended_s for s in streams) - begun_s,
    )


async def _end(deployment: OperatedDeployment, clock: Clock) -> list[str]:
    """Ends the deployment as a user does. Returns the process ids that are still alive
    afterwards.
    """

    async def ended() -> bool:
        return deployment.has_ended()

    async def gone() -> bool:
        return not deployment.marked()

    deployment.interrupt()
    await holds_within(ended, GONE_WITHIN_S, clock)
    await holds_within(gone, GONE_AFTER_S, clock)
    return [f"{pid} {command}" for pid, command in deployment.marked().items()]


def is_whole(seen: SeenPools, plan: ChaosPlan) -> bool:
    """Returns True if the pools have their planned sizes and all workers are idle.

    The controller's own view does not suffice: a role change that a fault did not undo would look
    planned.
    """
    roles = Counter(worker.role for worker in seen.workers if worker.works)
    as_planned = roles == {Role.PREFILL: plan.prefill, Role.DECODE: plan.decode}
    return seen.settled and as_planned and seen.is_idle


class _Watch:
    """Records the times in which workers are absent, until it is cancelled."""

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock
        self._absent_s: dict[str, float] = {}  # begin of each worker's current absence, by worker
        self.outages: list[Outage] = []

    async def run(self) -> None:
        """Polls the pools until it is cancelled."""
        while True:
            now_s = self._clock.now_s()
            for worker in (await self._deployment.check()).workers:
                name = worker.worker_id
                if worker.state in ("waiting", "starting", "joining"):
                    self._absent_s.setdefault(name, now_s)
                elif name in self._absent_s:
                    self.outages.append(Outage(name, now_s - self._absent_s.pop(name)))
            await pause(WATCH_EVERY_S)


SPECIAL = {FaultKind.PARTITION, FaultKind.DISK_FULL, FaultKind.EVERYTHING, *OF_RAY}
BY_DEFAULT = ",".join(kind for kind in FaultKind if kind not in SPECIAL)


def chaos(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1000,
    rate: Annotated[float, typer.Option(help="Requests/s, kept up during faults.")] = 4.0,
    kill_every: Annotated[float, typer.Option(help="Seconds between kills.")] = 5.0,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    gateways: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 2,
    spares: Annotated[int, typer.Option(min=0, help="Workers that wait to take a place.")] = 0,
    store_mib: Annotated[
        int, typer.Option(min=0, help="MiB of a store's memory; 0: there is no store.")
    ] = 64,
    faults: Annotated[
        str,
        typer.Option(
            help=f"Kinds, of {', '.join(FaultKind)}, between commas. A partition needs root and"
            " iproute2: each worker is in a network namespace of its own. gcs, raylet need Ray."
        ),
    ] = BY_DEFAULT,
    seed: SeedOption = 0,
    each: Annotated[
        bool, typer.Option("--each", help="One kind after the other, each in a new deployment.")
    ] = False,
    quick_: Annotated[bool, quick_option("60 requests: under 50 s.")] = False,
    json: JsonOption = None,
) -> None:
    """Kill, stop, slow down and cut off services under load; exit 1 if a request or a block is
    lost, or if a planned kind of fault did not happen.
    """
    with printed_errors():
        plan = ChaosPlan(
            num_requests=requests,
            rate_per_s=rate,
            every_s=kill_every,
            prefill=prefill,
            decode=decode,
            gateways=gateways,
            spares=spares,
            store_mib=store_mib,
            kinds=values_of("--faults", faults, FaultKind, f"a list of {', '.join(FaultKind)}"),
            seed=seed,
        )
        plan = quick(plan) if quick_ else plan
        plans = [replace(plan, kinds=(kind,)) for kind in plan.kinds] if each else [plan]
        for one in plans:
            check(one)
        runs = [measure(one, say_on_stderr()) for one in plans]
        report = report_here(
            _report_name(plan) if each else "chaos",
            seed=seed,
            config=config_of(plan),
            results=results_of([row_of(run) for run in runs]) if each else results(runs[0]),
        )
        title = (
            f"{plan.num_requests} requests at {plan.rate_per_s:g}/s, {plan.prefill} + {plan.decode}"
            f" workers, a fault of {config_of(plan)['faults']} every {plan.every_s:g} s"
        )
        publish(report, json, title=title)
    for run in runs:
        print_lines(Console(), story(run))
        print_lines(Console(), complaints(run), style="red")
    if not has_passed(report.results):
        raise typer.Exit(1)


def _report_name(plan: ChaosPlan) -> str:
    """Returns the report's name. A run with a single kind of fault has its own report."""
    return "faults" if len(plan.kinds) > 1 else str(plan.kinds[0])
