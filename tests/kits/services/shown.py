"""A deployment for tests of the web pages, with events in its pools and an unfinished request.

The pools are a real machine and a real planner with fake workers. The planner has changed a
worker's role, a worker has died repeatedly, and a new version is taking over. The router is
scripted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from deploy.base.spec import WorkerReady
from deploy.controller.reports import cluster_report
from deploy.pools.orders import AddVersion, SetPlanner
from deploy.pools.planning import Planning
from engine.clock import MonotonicClock, unix_time_s
from engine.config import PlannerMode
from engine.control import MAIN_LINE, ClusterReport, GatewayReport, Members, Pools, Version
from engine.demand import DecodeCost, Observation
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, LoadReport, Role, Welcome, WorkerId
from router.cluster.learning import MovedKv
from router.gateway.app import app_of
from router.gateway.background import BackgroundWork
from router.gateway.metrics.pools import PoolBoard
from router.machine.requests import Forecast, Stay, Timeline, Update
from router.planning.planner import PlannerRules
from router.policies.base import Decision, PrefillCandidate
from router.port import WorkerStatus
from tests.kits.pools import PoolWorld, settled
from tests.kits.router.gateway import (
    EOS,
    STOP,
    FakeRouter,
    Never,
    create_parts,
    settings_of,
    versions_of,
)
from tests.kits.router.served_app import served
from tests.kits.services.served import HTTP

NUM_BLOCKS = 100
LOAD = LoadReport(40, 30, 20, 6, 4, waiting_seqs=1, running_seqs=5, open_leases=2)
READING = Observation(
    requests_per_s=3.0,
    prefill_s_per_s=3.0,
    queued_s=3.0,
    num_decoding=2,
    decode_cost=DecodeCost(fixed_s=0.010, row_s=2e-4, context_s=0.0),
)
LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))


class ShownPools:
    """Pools with a history of events."""

    def __init__(self) -> None:
        self._world = world = settled(Pools(2, 2))
        self._planning = Planning(
            world.machine, PlannerRules(ttft_s=2.0, tpot_s=0.03), order=world.feed
        )
        self._let_the_planner_flip()
        self.dead = max(name for name, role in world.roles().items() if role is Role.PREFILL)
        self._let_a_version_take_over()
        self._let_a_worker_die()

    @property
    def roles(self) -> dict[WorkerId, Role]:
        """Returns the running workers of the first version with their roles."""
        found = self._world.processes.items()
        return {WorkerId(name): each.role for name, each in found if each.version == "v1"}

    def news(self) -> ClusterReport:
        """Returns the message that the controller would send now."""
        world = self._world
        ready = {name: WorkerReady("", 1, 1000, NUM_BLOCKS, 1, 0.0) for name in self.roles}
        return cluster_report(
            world.machine,
            self._planning,
            workers=ready,
            gateways={},
            counters=dict(world.machine.counters),
            admin_url="http://127.0.0.1:9",
            epoch_s=unix_time_s() - world.now_s,
        )

    def members(self) -> Members:
        """Returns the members that the controller would have sent to gateways."""
        return Members(1, (), self._world.machine.intent)

    def _let_the_planner_flip(self) -> None:
        world = self._world
        world.feed(SetPlanner(PlannerMode.ON))
        report = GatewayReport(None, 1, 2, 0, 0, 0.0, {MAIN_LINE: READING})
        for _ in range(90):  # the planner waits until the pools are steady
            world.run(1)
            if self._planning.tick([report], self._infos(world), world.now_s):
                break
        world.feed(SetPlanner(PlannerMode.OFF))
        world.settle()

    def _let_a_version_take_over(self) -> None:
        world = self._world
        world.ends = {"v1": (10, 0, 1), "v2": (1, 0, 0)}
        v2 = Version("v2", "other", "tiny", pools=Pools(1, 1), weight=0)
        world.feed(AddVersion(v2, takes_over=True, canary=(5, 50), hold_s=60.0))
        while not world.machine.intent.current.weight < 100:
            world.run(1)
        world.run(5)

    def _let_a_worker_die(self) -> None:
        world = self._world
        world.die(self.dead)
        world.fails = ["no space left on device"] * 3
        world.run(10)

    @staticmethod
    def _infos(world: PoolWorld) -> dict[WorkerId, Welcome]:
        return {
            name: Welcome(PROTOCOL_VERSION, name, "inc", worker.role, "fp", LAYOUT, 1000, 64)
            for name, worker in world.machine.workers.items()
        }


def _timeline(prefill: WorkerId, decode: WorkerId) -> Timeline:
    return Timeline(
        route_s=0.2,
        queue_s=1.5,
        prefill_queue_s=0.4,
        prefill_compute_s=2.0,
        kv_wait_s=0.5,
        decode_queue_s=0.2,
        kv_transfer_s=1.2,
        kv_exposed_s=0.4,
        num_cached_tokens=2,
        prefill_worker=prefill,
        decode_worker=decode,
        decision=Decision(
            "slo",
            "least TTFT <b>of all</b>",
            prefill,
            decode,
            3,
            candidates=(
                PrefillCandidate(prefill, 0.2, 1.5, 2),
                PrefillCandidate(decode, 0.0, None, 0),
            ),
        ),
        stays=(Stay(prefill, decode, 1.7, 2.1, 4.1, 4.6, 4.8),),
    )


def _router(pools: ShownPools) -> FakeRouter:
    prefill, other = [name for name, role in pools.roles.items() if role is Role.PREFILL][:2]
    decode = next(name for name, role in pools.roles.items() if role is Role.DECODE)
    line = _timeline(prefill, decode)
    updates = [Update(token_ids=(byte,), timeline=line) for byte in b"an *answer* <b>of</b> `code`"]
    ends = [*updates, Update(token_ids=(EOS,), outcome=STOP, timeline=line)]
    router = FakeRouter([*updates, Never()], *[ends] * 12)  # the first request never finishes
    router.clock = MonotonicClock()
    router.moved.append(MovedKv(prefill, decode, 3, 5_000_000, 5_000_000, 0.5, 0.1))
    router.severed_pairs.append((other, decode))
    router.events["retried", "worker lost"] = 3
    for name, role in pools.roles.items():
        forecast = Forecast(wait_s=0.2, tpot_s=0.01)
        router.statuses[name] = WorkerStatus(role, LOAD, 0, 0, forecast, 64, num_blocks=NUM_BLOCKS)
    return router


@contextmanager
def shown(pools: ShownPools) -> Iterator[str]:
    """Serves a gateway of these pools, with content in every part of the dashboard."""
    router = _router(pools)
    versions = versions_of(router)
    settings = settings_of(slo_ttft_s=2.0, slo_tpot_s=0.5)
    parts = create_parts(versions, clock=router.clock, settings=settings)
    board = PoolBoard(versions, router.clock)
    board.cluster, board.members = pools.news(), pools.members()
    for ago in range(60, 0, -1):
        tokens = 9 * (60 - ago)
        parts.recent.sample(
            router.clock.now_s() - ago, queue=ago % 7, in_flight=2, answer_tokens=tokens
        )
    work = BackgroundWork()
    with served(app_of(parts, board=board, background=work), work) as address:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "<i>yo</i>"}]}
        asked = f"{address}/v1/chat/completions"
        with (
            httpx.Client(trust_env=False) as client,
            client.stream("POST", asked, json={**body, "stream": True}) as running,
        ):
            # keeps the iterator, because its deletion would close the stream
            pieces = running.iter_raw()
            next(pieces)
            for _ in range(3):
                HTTP.post(asked, json=body)
            yield address
