"""The versions that a controller names: which of them a gateway serves, and from when."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from engine.clock import MonotonicClock
from engine.control import Intent, Member, Members, Pools, Rollout, Version
from engine.messages import WorkerId
from router import version_routers
from router.gateway.versions import NO_WORKER, Versions
from router.inbox.api_errors import ApiError
from router.version_routers import VersionRouters
from tests.kits.router.gateway import (
    TEMPLATE,
    FakeRouter,
    TickingClock,
    get,
    make_app_of,
    post,
    text_model,
)

DEADLINE_S = 5.0


class SessionRouter(FakeRouter):
    """A router that records its workers' addresses and whether it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = SimpleNamespace(num_flights=0, longest_len=0)
        self.addresses: list[str] = []
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    def follow(self, addresses: list[str]) -> None:
        self.addresses = addresses


class World:
    """The versions of a gateway.

    The tokenizers of held versions do not load until the test allows it.
    """

    def __init__(self, *held: str) -> None:
        self.held = {name: threading.Event() for name in held}
        self.routers = VersionRouters(
            new_router=SessionRouter, load_text=self._load, clock=MonotonicClock()
        )

    def _load(self, version: Version) -> object:
        if version.name in self.held:
            assert self.held[version.name].wait(DEADLINE_S)
        return text_model(TEMPLATE)

    @property
    def versions(self) -> Versions:
        return self.routers.versions

    def names(self) -> list[str]:
        """Returns the names in the table by which requests are placed."""
        return [each.name for each in self.versions.table]


def play(scene: Callable[..., object], *held: str) -> None:
    async def whole() -> None:
        world = World(*held)
        try:
            await asyncio.wait_for(scene(world), DEADLINE_S)
        finally:
            for event in world.held.values():
                event.set()
            await world.routers.close()

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    never = asyncio.get_running_loop().create_future()
    while not condition():
        await asyncio.wait([never], timeout=0.002)


def members(number: int, *versions: Version, workers: str = "") -> Members:
    """Returns members. `workers` has a letter for each version with a worker, and otherwise `-`."""
    has = workers.ljust(len(versions), "w")
    return Members(
        number,
        tuple(
            Member(WorkerId(f"{v.name}-0"), f"{v.name}:1", v.name, context_len=64)
            for v, letter in zip(versions, has, strict=True)
            if letter == "w"
        ),
        Intent(versions),
    )


V1, V2 = Version("v1", model_name="old"), Version("v2", model_name="new")
SMALL = Version("small-v1", model_name="small", line="small")
LEAVING = Version("v1", model_name="old", weight=0, is_leaving=True)


def test_a_gateway_that_starts_while_a_version_leaves_waits_for_one_that_takes_requests():
    async def scene(world: World) -> None:
        assert await world.routers.open(members(1, LEAVING, V2)) == V2
        assert world.names() == ["v2"]
        assert world.versions.choose(key="", model="new").name == "v2"
        world.held["v1"].set()
        await until(lambda: world.names() == ["v1", "v2"])
        assert world.versions.choose(key="").name == "v2"

    play(scene, "v1")


@pytest.mark.parametrize(
    ("first", "second", "which"),
    [
        (Version("v1"), Version("v2"), "v1"),
        (Version("v1", weight=0), Version("v2"), "v2"),
        (LEAVING, Version("v2", weight=0), "v2"),
    ],
)
def test_the_first_that_takes_requests_is_loaded_before_all_others(first, second, which):
    async def scene(world: World) -> None:
        assert (await world.routers.open(members(1, first, second))).name == which
        assert world.names() == [which]

    play(scene, *({"v1", "v2"} - {which}))


def test_last_version_waits_for_one_that_cannot_serve_yet():
    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1))
        world.routers.follow(members(2, LEAVING, V2))
        assert world.names() == ["v1"]
        assert world.versions.readiness() == NO_WORKER
        for asked in ({}, {"model": "old"}, {"model": "new"}, {"version": "v2"}):
            with pytest.raises(ApiError) as caught:
                world.versions.choose(key="", **asked)
            assert caught.value.status == 503
        world.held["v2"].set()
        await until(lambda: world.names() == ["v1", "v2"])
        assert world.versions.readiness() is None

    play(scene, "v2")


def test_the_longest_request_of_a_report_runs_or_ran_lately():
    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1))
        [router] = world.routers.routers().values()

        def longest_len() -> int:
            return world.routers.reports()["v1"].longest_len

        now_s = MonotonicClock().now_s()
        world.versions.tallies.record("v1", failed=False, late=False, num_tokens=500, now_s=now_s)
        router.machine.longest_len = 400
        assert longest_len() == 500
        router.machine.longest_len = 900
        assert longest_len() == 900

    play(scene)


def test_a_gateway_without_any_worker_answers_that_it_is_not_ready():
    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1, workers="-"))
        assert world.names() == []
        assert world.versions.fingerprint() == ""
        assert world.versions.models() == {}
        assert world.versions.readiness() == NO_WORKER
        assert list(world.routers.reports()) == ["v1"]
        world.routers.follow(members(2, V1))
        assert world.names() == ["v1"]
        assert world.versions.readiness() is None
        world.routers.follow(members(3, V1, workers="-"))
        assert world.names() == ["v1"], "what was served before is the best there is"

    play(scene)


def test_versions_without_a_known_worker_are_told_as_coming():
    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1, SMALL, workers="w-"))
        for asked, status in (
            ({"model": "small"}, 503),
            ({"version": "small-v1"}, 503),
            ({"model": "other"}, 404),
            ({"version": "other"}, 404),
        ):
            with pytest.raises(ApiError) as caught:
                world.versions.choose(key="", **asked)
            assert caught.value.status == status
        world.routers.follow(members(2, V1, SMALL))
        await until(lambda: world.names() == ["v1", "small-v1"])
        assert world.versions.choose(key="", model="small").name == "small-v1"

    play(scene)


def test_without_any_worker_the_pages_say_so():
    app = make_app_of(Versions(), TickingClock())
    assert get(app, "/ready").status == 503
    refused = post(app, "/v1/completions", {"model": "old", "prompt": "yo"})
    assert refused.status == 503
    assert refused.json()["error"]["type"] == "server_error"
    assert refused.headers["retry-after"] == "1"
    page = get(app, "/metrics")
    assert page.status == 200
    assert 'vllm:num_requests_running{model_name=""} 0.0' in page.body.decode()
    assert get(app, "/v1/models").json()["data"] == []


def test_unnamed_version_closes_after_its_last_request():
    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1))
        router = world.versions.table[0].port
        router.machine.num_flights = 1
        world.routers.follow(members(2, V2))
        await until(lambda: world.names() == ["v2"])
        assert router.is_open
        router.machine.num_flights = 0
        await until(lambda: not router.is_open)

    play(scene)


def test_a_version_with_new_requests_stays_until_another_serves():
    """A gateway has this state after it has missed the controller's messages for some time."""

    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1))
        router = world.versions.table[0].port
        world.routers.follow(members(2, V2))
        never = asyncio.get_running_loop().create_future()
        await asyncio.wait([never], timeout=0.05)  # waits to see that nothing happens
        assert world.names() == ["v1"]
        assert router.is_open
        world.held["v2"].set()
        await until(lambda: not router.is_open)
        assert world.names() == ["v2"]

    play(scene, "v2")


def test_a_tokenizer_that_cannot_be_loaded_is_reported_and_tried_again(monkeypatch):
    monkeypatch.setattr("router.version_routers.RETRY_EVERY_S", 0.01)

    async def scene(world: World) -> None:
        failures = [OSError("no disk")]
        load = world.routers._load_text

        def load_at_last(version: Version) -> object:
            if version.name == "v2" and failures and world.held["v2"].is_set():
                raise failures[0]
            return load(version)

        world.routers._load_text = load_at_last
        await world.routers.open(members(1, V1))
        world.held["v2"].set()
        world.routers.follow(members(2, V1, V2))
        told = "it cannot be loaded: no disk"
        await until(lambda: world.routers.reports()["v2"].missing == told)
        failures.clear()
        await until(lambda: world.names() == ["v1", "v2"])
        assert world.routers.reports()["v2"].missing is None

    play(scene, "v2")


def test_answers_that_hang_are_looked_for_only_while_a_version_takes_over():
    async def scene(world: World) -> None:
        await world.routers.open(members(1, V1, V2))
        await until(lambda: world.names() == ["v1", "v2"])
        world.versions.tallies.hung = lambda _: {"v2": 3}
        assert [each.num_hung for each in world.routers.reports().values()] == [0, 0]
        rolling = Intent((V1, V2), rollout=Rollout("v2", Pools(1, 1), before=(V1,)))
        world.routers.follow(msgspec.structs.replace(members(2, V1, V2), intent=rolling))
        assert [each.num_hung for each in world.routers.reports().values()] == [0, 3]

    play(scene)


def test_a_version_that_takes_over_is_probed_through_the_endpoints_too(monkeypatch):
    asked: list[str] = []

    async def fault_of(name: str) -> str:
        asked.append(name)
        return "its stream is cut"

    async def no_fault(*_: object) -> str:
        return ""

    async def scene(world: World) -> None:
        monkeypatch.setattr(version_routers, "fault_of_version", no_fault)
        world.routers.more_probes = fault_of
        await world.routers.open(members(1, V1))
        new = msgspec.structs.replace(V2, weight=0)
        rolling = Intent((V1, new), rollout=Rollout("v2", Pools(1, 1), before=(V1,)))
        world.routers.follow(msgspec.structs.replace(members(2, V1, new), intent=rolling))
        await until(lambda: world.routers.reports()["v2"].probe is not None)
        assert world.routers.reports()["v2"].probe == "its stream is cut"
        assert asked == ["v2"]

    play(scene)
