"""The shell of the pools: a new controller takes over, and launchers and sessions fail."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest

from deploy.admin import api as admin
from deploy.admin.api import AdminService
from deploy.base.spec import GatewayReady, WorkerReady, WorkerSpec
from deploy.controller import controller, services, sessions, tasks
from deploy.controller.controller import PoolController
from deploy.controller.links import GatewayLink
from deploy.controller.plan import ControllerPlan
from deploy.pools.events import Connected
from deploy.pools.orders import SetPlanner, SetPools, Stop
from deploy.pools.placement import NoRoom
from deploy.pools.workers.record import WorkerState
from engine.config import AdminConfig, Config, PlannerConfig, PlannerMode, PoolsConfig
from engine.control import (
    CONTROL_VERSION,
    MAIN_LINE,
    ClusterReport,
    ControllerReport,
    GatewayReport,
    GatewayWelcome,
    Intent,
    Member,
    Members,
    Pools,
    Version,
    decode_from_controller,
    encode_control,
)
from engine.demand import Observation
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import Role
from router.gateway.metrics.families import decode_metrics

DEADLINE_S = 5.0
ROLES = {"worker-0": Role.PREFILL, "worker-1": Role.DECODE}
WORKERS = {
    name: WorkerReady(f"{name}:1", pid=7, context_len=64, num_blocks=8, block_bytes=64, start_s=0.0)
    for name in ROLES
}
GATEWAY = {"gateway": GatewayReady("http://127.0.0.1:80", "m", 7, "gateway:1")}


class SetClock:
    """A clock that advances only when the test sets it."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class FakeLauncher:
    """A launcher whose services start at once, or whose calls raise."""

    def __init__(self, running) -> None:
        self.services = dict(running)
        self.errors: list[Exception] = []  # errors that the next calls raise
        self.stopped: list[tuple[str, bool]] = []
        self.num_places = 4
        self.num_looks = 0
        self.asked_for: list[tuple[int, Pools]] = []
        self.kept: list[set[str]] = []
        self.may_start = threading.Event()
        self.may_start.set()

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def room(self, num_gpus):
        self.num_looks += 1
        return self.num_places

    def scarce(self, num_gpus):
        return "there are 4 places"

    def nodes(self):
        return ("",)

    def keep_places(self, names):
        self.kept.append(set(names))

    def ask_for(self, num_workers, wanted, num_gpus):
        self.asked_for.append((num_workers, wanted))

    def running(self):
        return dict(self.services)

    def dead(self):
        return {}

    def health(self):
        return {"gcs": True, "raylet": False}

    def counters(self):
        return {"nurseries lost": 0}

    def start(self, spec):
        assert isinstance(spec, WorkerSpec), "no test gets so far"
        self._fail()
        assert self.may_start.wait(DEADLINE_S)
        ready = WORKERS.get(spec.worker_id, WORKERS["worker-0"])
        self.services[spec.worker_id] = ready
        return ready

    def stop(self, name, *, by_force):
        self._fail()
        self.stopped.append((name, by_force))
        self.services.pop(name, None)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


class World:
    """A controller, its launcher, and sessions that only the test opens."""

    def __init__(self, running, config) -> None:
        self.clock = SetClock()
        self.launcher = FakeLauncher(running)
        self.told: list[str] = []
        plan = ControllerPlan("model", config, Pools(1, 1), "token", cores=1)
        self.controller = PoolController(
            plan, launcher=self.launcher, clock=self.clock, report=self.told.append
        )
        self.links: dict[str, object] = {}  # sessions by address

    def connect(self, *names: str) -> None:
        """Connects these workers, by default both workers."""
        for name in names or WORKERS:
            address = WORKERS[name].address
            self.controller._handle(Connected(name, address, ROLES[name], KVFormat.FP32))

    async def talk(self, address: str, _secret: object, link: object) -> None:
        self.links[address] = link
        await asyncio.get_running_loop().create_future()


@pytest.fixture
def playing(monkeypatch):
    """Returns a function that makes a world whose controller finds these running services."""
    monkeypatch.setattr(controller, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(services, "RETRY_STOP_EVERY_S", 0.01)

    @asynccontextmanager
    async def run(running, config=None):
        world = World(running, config or Config())
        monkeypatch.setattr(sessions, "talk", world.talk)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield world
        finally:
            await world.controller.close()

    return run


class FakeGateway:
    """The gateway's side of a session. It accepts members of a higher version."""

    def __init__(self, members: Members | None) -> None:
        self.news: list[ControllerReport] = []
        self.cluster: list[ClusterReport] = []
        self.members = members

    async def send(self, _frame: bytes) -> None:
        pass

    async def receive(self) -> bytes:
        return encode_control([GatewayWelcome(CONTROL_VERSION, "gateway", self.members)])

    def post(self, frame: bytes) -> None:
        [members] = decode_from_controller(frame)
        if isinstance(members, ControllerReport):
            self.news.append(members)
            return
        if isinstance(members, ClusterReport):
            self.cluster.append(members)
            return
        assert isinstance(members, Members)
        if self.members is None or members.version > self.members.version:
            self.members = members

    async def connect(self, link: object) -> None:
        assert isinstance(link, GatewayLink)
        await link.shake_hands(self)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    never = asyncio.get_running_loop().create_future()
    while not condition():
        await asyncio.wait([never], timeout=0.005)


class FakeListener:
    """A listener that accepts no connection."""

    def __init__(self, _app: object, _book: object) -> None:
        pass

    def open(self, _sock: object) -> None:
        pass

    async def close(self, _drain_timeout_s: float, _cut: object) -> None:
        pass


async def test_next_controller_takes_over_while_no_gateway_runs(playing, monkeypatch, tmp_path):
    sock = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 7), close=lambda: None)
    monkeypatch.setattr(admin.socket, "create_server", lambda _: sock)
    monkeypatch.setattr(admin, "Listener", FakeListener)
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path))

    async with playing(WORKERS) as world:
        config = AdminConfig(key="key")
        service = AdminService(world.controller, config=config, clock=world.clock)
        assert await service.open() == "http://127.0.0.1:7"
        assert world.controller.url == ""
        await service.close()


OLD = Members(
    5,
    tuple(Member(name, ready.address, context_len=64) for name, ready in WORKERS.items()),
    Intent((Version(pools=Pools(1, 1)),)),
)


SECOND = Version("v2", model="other", pools=Pools(1, 1))


async def test_reconnected_gateway_gets_the_members_it_missed(playing):
    async with playing(WORKERS | GATEWAY) as world:
        gateway = FakeGateway(OLD)
        opening = asyncio.create_task(world.controller.open())
        await until(lambda: "gateway:1" in world.links)
        link = world.links["gateway:1"]
        await gateway.connect(link)
        await opening
        assert gateway.members.version > OLD.version
        link.lost("cut off")
        world.controller.order(SetPools(Pools(1, 2)))
        assert gateway.members.intent.pools == Pools(1, 1)
        await gateway.connect(link)
        assert gateway.members.intent.pools == Pools(1, 2)


async def test_gateway_heard_late_follows_the_new_controller(playing, monkeypatch):
    monkeypatch.setattr(sessions, "HANDSHAKE_TIMEOUT_S", 0.01)

    async with playing(WORKERS | GATEWAY) as world:
        await world.controller.open()
        assert world.controller.machine.members.version < OLD.version
        gateway = FakeGateway(OLD)
        await gateway.connect(world.links["gateway:1"])
        assert gateway.members == world.controller.machine.members
        assert gateway.members.version > OLD.version


async def test_gateway_heard_late_supplies_the_intent(playing, monkeypatch):
    monkeypatch.setattr(sessions, "HANDSHAKE_TIMEOUT_S", 0.01)
    others = {name: msgspec.structs.replace(ready, version="v2") for name, ready in WORKERS.items()}
    told = Members(
        0, tuple(Member(n, w.address, "v2", 64) for n, w in others.items()), Intent((SECOND,))
    )

    async with playing(others | GATEWAY) as world:
        world.launcher.num_places = 2
        await world.controller.open()
        for name, ready in others.items():
            await until(lambda name=name: name in world.controller.sessions.links)
            world.controller._handle(Connected(name, ready.address, ROLES[name], KVFormat.FP32))
        assert {w.state for w in world.controller.machine.workers.values()} == {WorkerState.SERVING}
        gateway = FakeGateway(told)
        await gateway.connect(world.links["gateway:1"])
        assert gateway.members == world.controller.machine.members
        assert gateway.members.intent == told.intent
        assert {w.state for w in world.controller.machine.workers.values()} == {WorkerState.SERVING}
        assert world.launcher.stopped == []


async def test_launcher_that_raises_is_asked_again(playing):
    async with playing({"worker-0": WORKERS["worker-0"]}) as world:
        launcher = world.launcher
        await world.controller.open()
        launcher.errors = [OSError("no start"), RuntimeError("no stop")]
        world.connect("worker-0")
        await until(lambda: ("worker-1", True) in launcher.stopped)
        workers = world.controller.machine.workers
        await until(lambda: workers["worker-1"].state is WorkerState.WAITING)
        world.clock.at_s = 10.0
        await until(lambda: workers["worker-1"].state is WorkerState.JOINING)
    assert any("did not start: no start" in line for line in world.told), world.told
    assert "the controller has a bug: RuntimeError('no stop')" in world.told


async def test_session_restarts_after_a_bug(playing, monkeypatch):
    num_talks = 0

    async def talk(_address: str, _secret: object, _link: object) -> None:
        nonlocal num_talks
        num_talks += 1
        raise KeyError("a bug")

    async with playing(WORKERS) as world:
        monkeypatch.setattr(sessions, "talk", talk)
        monkeypatch.setattr(sessions, "RETRY_EVERY_S", 0.01)
        await world.controller.open()
        await until(lambda: num_talks > len(WORKERS))
        assert world.controller.counters["controller bugs"] >= 1
        assert "nurseries lost" not in world.controller.counters


async def test_stopped_worker_is_gone_only_after_its_start_has_ended(playing):
    async with playing(WORKERS) as world:
        launcher = world.launcher
        await world.controller.open()
        machine = world.controller.machine
        world.connect()
        launcher.may_start.clear()
        world.controller.order(SetPools(Pools(2, 1)))
        world.controller.order(Stop("worker-2"))
        # The stop is repeated while the start is still running.
        await until(lambda: launcher.stopped.count(("worker-2", True)) > 1)
        assert machine.workers["worker-2"].state is WorkerState.STOPPING
        launcher.may_start.set()
        await until(lambda: "worker-2" not in machine.workers)
        assert "worker-2" not in launcher.services


async def test_long_fetches_delay_no_other_order(playing, monkeypatch):
    monkeypatch.setattr(tasks, "MAX_THREADS", 1)

    async with playing(WORKERS) as world:
        launcher = world.launcher
        await world.controller.open()
        world.connect()
        launcher.may_start.clear()
        world.controller.order(SetPools(Pools(2, 2)))
        num_looks = launcher.num_looks
        await until(lambda: launcher.num_looks > num_looks + 2)
        world.controller.order(Stop("worker-2"))
        await until(lambda: ("worker-2", True) in launcher.stopped)
        launcher.may_start.set()


async def test_launchers_error_ends_a_first_start(playing):
    async with playing({}) as world:
        world.launcher.errors = [OSError("no start")]
        with pytest.raises(ConfigError, match=r"^no start$"):
            await world.controller.open()


async def test_first_start_waits_for_expected_nodes(playing):
    async with playing({}, Config(pools=PoolsConfig(max_workers=4))) as world:
        world.launcher.errors = [NoRoom("no node")]
        opening = asyncio.create_task(world.controller.open())
        await until(lambda: any("did not start: no node" in line for line in world.told))
        world.clock.at_s = 10.0
        await until(lambda: opening.done() or set(world.launcher.services) == set(WORKERS))
        assert not opening.done()
        opening.cancel()


async def test_first_start_without_expected_nodes_fails_at_once(playing):
    async with playing({}) as world:
        world.launcher.errors = [NoRoom("no node")]
        with pytest.raises(ConfigError, match=r"^no node$"):
            await world.controller.open()


async def test_places_are_given_up_once_all_found_roles_are_known(playing):
    async with playing({"worker-0": WORKERS["worker-0"]}) as world:
        await world.controller.open()
        looked = world.launcher.num_looks
        await until(lambda: world.launcher.num_looks > looked + 1)
        assert world.launcher.kept == []  # the controller does not know yet that worker-1 is wanted
        world.connect("worker-0")
        await until(lambda: world.launcher.kept != [])
        assert world.launcher.kept[0] == set(WORKERS)


# ---------------------------------------------------------------- planner

FLOOD = Observation(requests_per_s=9.0, prefill_s_per_s=9.0, queued_s=9.0)
PLANNED = Config(planner=PlannerConfig(mode=PlannerMode.ON, max_workers=6, grow_after_s=0.0))


async def test_controller_plans_from_reports_and_asks_for_room(playing, monkeypatch):
    monkeypatch.setattr(sessions, "HANDSHAKE_TIMEOUT_S", 0.01)

    async with playing(WORKERS | GATEWAY, PLANNED) as world:
        pools = world.controller
        await pools.open()
        assert pools.machine.intent.planner is PlannerMode.ON
        world.connect()
        link = world.links["gateway:1"]
        link.take(encode_control([GatewayReport(None, 1, 2, 0, 0, 0.0, {MAIN_LINE: FLOOD})]))
        await until(lambda: world.launcher.asked_for == [(6, Pools(3, 1))])
        assert pools.machine.intent.pools == Pools(3, 1)  # there is room for only four workers
        assert any(
            line.startswith("planner (on): prefill 1 → 3, room for 6") for line in world.told
        )
        world.launcher.num_places = 7
        await until(lambda: pools.machine.limits.max_workers == 7)
        pools.order(SetPlanner(PlannerMode.OFF))
        await until(lambda: world.launcher.asked_for[1:] == [(0, Pools(3, 1))])
    assert "pools can have 7 workers: before, 4" in world.told


async def test_gateways_get_metrics_and_urls_every_second(playing):
    async with playing(WORKERS | GATEWAY) as world:
        gateway = FakeGateway(OLD)
        opening = asyncio.create_task(world.controller.open())
        await until(lambda: "gateway:1" in world.links)
        await gateway.connect(world.links["gateway:1"])
        await opening
        await until(lambda: bool(gateway.news))
        assert gateway.news[0].gateways == ("http://127.0.0.1:80",)
        assert [each.name for each in gateway.cluster[0].gateways] == ["gateway"]
        names = {family.name for family in decode_metrics(gateway.news[-1].metrics)}
        assert names >= {"baton_service_restarts", "baton_launcher_up", "baton_pools_settled"}
        assert not any("bug" in line for line in world.told)
