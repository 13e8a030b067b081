"""Launchers on a fake Ray: a start that is abandoned, and a Ray that does not answer."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deploy.base.spec import GatewayReady, GatewaySpec
from deploy.pools.placement import NodePlacement
from engine.config import GatewayConfig, RouterConfig
from engine.control import Intent, Members
from engine.errors import ConfigError
from engine.messages import Role

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.ray

DEADLINE_S = 30.0
SPEC = GatewaySpec(Members(0, (), Intent()), GatewayConfig(), RouterConfig(), "token")
READY = GatewayReady("http://127.0.0.1:80", "model", 7, "gateway:1")


@pytest.fixture
def actors(monkeypatch) -> list[Any]:
    """Records all created actors. The result of a start call is the actor itself."""
    import ray

    made: list[Any] = []

    def make(*_arguments: object) -> Any:
        actor = SimpleNamespace(is_killed=False)
        actor.start = SimpleNamespace(remote=lambda: actor)
        actor.ping = SimpleNamespace(remote=lambda: None)
        made.append(actor)
        return actor

    maker = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _class: maker)
    monkeypatch.setattr(ray, "kill", lambda actor: setattr(actor, "is_killed", True))
    return made


@pytest.mark.parametrize("fails", [True, False])
def test_stopped_start_leaves_the_next_actor_of_its_name_alone(monkeypatch, actors, fails):
    import ray

    from deploy.ray.launcher import OwnRayLauncher

    launcher = OwnRayLauncher()

    def get(actor: Any, timeout: float) -> Any:
        if actor is None:  # this call is a ping
            return None
        if actor is actors[0]:
            launcher.stop(SPEC.name, by_force=True)
            launcher.start(SPEC)
            if fails:
                raise ray.exceptions.RayActorError
        return msgspec.json.encode(READY), ""

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ConfigError):
        launcher.start(SPEC)
    assert [actor.is_killed for actor in actors] == [True, False]
    assert launcher.running() == {SPEC.name: READY}


def test_stop_all_withdraws_the_request_for_nodes(monkeypatch):
    from deploy.ray import launcher as ray_launcher
    from deploy.ray import places as ray_places

    asked: list[Any] = []
    monkeypatch.setattr(ray_launcher, "request_resources", lambda *, bundles: asked.append(bundles))
    monkeypatch.setattr(ray_places, "reserved", list)
    ray_launcher.ClusterLauncher(NodePlacement(1)).stop_all()
    assert asked == [[]]


def test_death_is_noted_while_ray_does_not_answer(monkeypatch):
    from deploy.ray import places as ray_places

    is_asked, is_answered = threading.Event(), threading.Event()

    def reserve(*_arguments: object) -> Any:
        is_asked.set()
        assert is_answered.wait(DEADLINE_S)
        return SimpleNamespace(wait=lambda _timeout_s: True)

    monkeypatch.setattr(ray_places, "_reserve", reserve)
    monkeypatch.setattr(ray_places, "nodes", list)
    monkeypatch.setattr(ray_places, "reserved", list)
    places = ray_places.RayPlaces(NodePlacement(1))
    with ThreadPoolExecutor(2) as threads:
        taking = threads.submit(places.take, "d0", Role.DECODE)
        try:
            assert is_asked.wait(DEADLINE_S)
            threads.submit(places.leave, "d1").result(DEADLINE_S / 2)
            assert threads.submit(places.roles).result(DEADLINE_S / 2) == [Role.DECODE]
        finally:
            is_answered.set()
        taking.result(DEADLINE_S)
