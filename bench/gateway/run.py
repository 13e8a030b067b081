"""Measures the cost of a gateway: starts all servers, loads them in turn, ends them.

One client process loads all servers. While it loads one server, the others sleep.
"""

import os
import sys
from contextlib import ExitStack
from dataclasses import replace

from bench.common.background import BusyWatch
from bench.common.progress import Say, say_nothing
from bench.gateway.plan import GatewayPlan, StreamLoad, body_of, order_of
from bench.gateway.results import GatewayMeasured, GatewayRun
from bench.gateway.servers import Server, open_all
from bench.processes.driven import Driven, begun

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 150.0


def measure(plan: GatewayPlan, say: Say = say_nothing) -> GatewayMeasured:
    """Carries out the plan. Raises DrivenFailed."""
    with ExitStack() as stack:
        say("starting the servers")
        servers = open_all(plan, stack)
        command = [sys.executable, "-m", "bench.gateway.client"]
        client = begun(Driven("client", command), stack)
        client.ready(START_TIMEOUT_S)
        for server in servers.values():
            _warm_up(plan, server, client)
        runs: list[GatewayRun] = []
        sessions = [session for server in servers.values() for session in server.sessions]
        sessions += [client.session or 0, os.getsid(0)]
        busy = BusyWatch(lambda: sessions)
        for repeat in range(plan.num_repeats):
            say(f"repetition {repeat + 1} of {plan.num_repeats}")
            with busy.repetition():
                for name in order_of(plan, repeat):
                    for load in (plan.serial, *plan.loads):
                        runs.append(_run(plan, servers[name], client, load=load, repeat=repeat))
        versions = {name: s.version for name, s in servers.items() if s.version}
        return GatewayMeasured(tuple(runs), tuple(busy.shares), versions)


def _warm_up(plan: GatewayPlan, server: Server, client: Driven) -> None:
    first = replace(plan.serial, num_rounds=20)
    _run(plan, server, client, load=first, repeat=0)
    for load in plan.loads:
        _run(plan, server, client, load=replace(load, num_rounds=1, num_tokens=4), repeat=0)


def _run(
    plan: GatewayPlan, server: Server, client: Driven, *, load: StreamLoad, repeat: int
) -> GatewayRun:
    before_s = server.cpu_s()
    seen = client.ask(
        "stream",
        timeout_s=ANSWER_TIMEOUT_S,
        port=server.port,
        body=body_of(plan, load),
        num_connections=load.num_streams,
        num_requests=load.num_requests,
        seed=(plan.seed * plan.num_repeats + repeat) * load.num_requests,
    )
    return GatewayRun(
        server=server.name,
        load=load,
        repeat=repeat,
        cpu_s=server.cpu_s() - before_s,
        client_cpu_s=seen["cpu_s"],
        wall_s=seen["wall_s"],
        num_events=seen["num_events"],
        ttft_s=tuple(seen["ttft_s"]),
        gaps_s=tuple(seen["gaps_s"]),
    )
