"""The shell of the pools: another controller takes over, and launchers and sessions fail."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace

import pytest

from deploy import admin, controller
from deploy.admin import AdminService
from deploy.controller import Plan, PoolController
from deploy.processes import WorkerReady
from engine.clock import MonotonicClock
from engine.config import AdminConfig, Config, PoolsConfig
from engine.control import Pools

DEADLINE_S = 5.0
WORKERS = {
    name: WorkerReady(
        f"{name}:1", pid=7, context_len=64, num_blocks=8, block_bytes=64, warm_up_s=0.0
    )
    for name in ("prefill-0", "decode-0")
}


class FakeLauncher:
    """Holds what runs; what is started is there at once, or raises."""

    def __init__(self, running) -> None:
        self.services = dict(running)
        self.errors: list[Exception] = []  # of the next calls
        self.stopped: list[tuple[str, bool]] = []

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def room(self, num_gpus):
        return 4

    def running(self):
        return dict(self.services)

    def dead(self):
        return {}

    def start_worker(self, spec):
        self._fail()
        self.services[spec.worker_id] = ready = WORKERS[spec.worker_id]
        return ready

    def start_gateway(self, spec):
        raise AssertionError("no test gets so far")

    def stop(self, name, *, by_force):
        self._fail()
        self.stopped.append((name, by_force))
        self.services.pop(name, None)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


class World:
    """A controller, its launcher, and sessions that are begun by the test alone."""

    def __init__(self, running, pools: Pools) -> None:
        self.launcher = FakeLauncher(running)
        self.told: list[str] = []
        plan = Plan("model", Config(pools=PoolsConfig()), pools, "token", cores=1)
        self.controller = PoolController(
            plan, launcher=self.launcher, clock=MonotonicClock(), report=self.told.append
        )
        self.links: dict[str, object] = {}  # by address

    async def keep(self, address: str, link: object) -> None:
        self.links[address] = link
        await asyncio.get_running_loop().create_future()


@pytest.fixture
def play(monkeypatch):
    """Runs a scene with the world of a controller that finds this running."""
    monkeypatch.setattr(controller, "WATCH_EVERY_S", 0.01)

    def run(
        scene: Callable[[World], Coroutine[None, None, None]], running, pools: Pools = Pools(1, 1)
    ) -> World:
        world = World(running, pools)
        monkeypatch.setattr(controller, "keep", world.keep)

        async def whole() -> None:
            try:
                await asyncio.wait_for(scene(world), DEADLINE_S)
            finally:
                await world.controller.close()

        asyncio.run(whole())
        return world

    return run


async def until(condition: Callable[[], bool]) -> None:
    never = asyncio.get_running_loop().create_future()
    while not condition():
        await asyncio.wait([never], timeout=0.005)


class FakeServer:
    """Uvicorn's."""

    should_exit = False

    def __init__(self, _config: object) -> None:
        pass

    async def serve(self, sockets: list[object]) -> None:
        pass


def test_another_controller_takes_over_while_no_gateway_runs(play, monkeypatch, tmp_path):
    sock = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 7), close=lambda: None)
    monkeypatch.setattr(admin.socket, "create_server", lambda _: sock)
    monkeypatch.setattr(admin.uvicorn, "Server", FakeServer)
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path))

    async def scene(world: World) -> None:
        config = AdminConfig(key="key")
        service = AdminService(world.controller, config=config, clock=MonotonicClock())
        assert await service.open() == "http://127.0.0.1:7"
        assert world.controller.url == ""
        await service.close()

    play(scene, WORKERS)
