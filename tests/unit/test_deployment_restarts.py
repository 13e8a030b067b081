"""Gateways that end are started again, later each time, whatever comes of an attempt."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest

from deploy.cluster import BUNDLED_MODEL, Deployment, Pools
from deploy.launcher import ProcessLauncher
from deploy.processes import GatewayReady, GatewaySpec, WorkerReady, WorkerSpec
from engine.config import Config, GatewayConfig, RouterConfig
from engine.errors import ConfigError

SPEC = GatewaySpec((), "model", 64, GatewayConfig(), RouterConfig(), "token")
READY = b'{"url": "http://127.0.0.1:80", "model_name": "m", "pid": 7}'
HOUR_S = 3600


class SetClock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class FakeLauncher:
    """Runs nothing. A gateway's start does what is next in `fates`, and succeeds after the last."""

    def __init__(self, clock: SetClock) -> None:
        self._clock = clock
        self._dead: dict[str, str] = {}
        self.fates: list[str] = []
        self.dies_at_once = False
        self.start_takes_s = 0.0
        self.starts: list[tuple[float, str]] = []  # (when, name)

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        return WorkerReady("address", 1, 64, 8, 1, 0.0)

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        self.starts.append((self._clock.time_s, spec.name))
        self._clock.time_s += self.start_takes_s
        if self.fates:
            raise ConfigError(self.fates.pop(0))
        if self.dies_at_once:
            self.end(spec.name)
        return GatewayReady("http://127.0.0.1:80", "m", len(self.starts))

    def end(self, name: str) -> None:
        self._dead[name] = f"{name} ended"

    def dead(self) -> dict[str, str]:
        dead, self._dead = self._dead, {}
        return dead


class World:
    """An open deployment, watched once a second from 0 on."""

    def __init__(self, processes: int = 1) -> None:
        self.clock = SetClock()
        self.launcher = FakeLauncher(self.clock)
        config = Config(gateway=GatewayConfig(processes=processes))
        self.deployment = Deployment(
            self.launcher, model=BUNDLED_MODEL, pools=Pools(), config=config
        )
        self.deployment.open(lambda _: None)
        self.launcher.starts.clear()

    def watch(self, seconds: int) -> list[str]:
        told: list[str] = []
        for _ in range(seconds):
            told += self.deployment.mend(self.clock)
            self.clock.time_s += 1
        return told

    def gaps(self) -> list[float]:
        times = [when for when, _ in self.launcher.starts]
        return [later - earlier for earlier, later in pairwise(times)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.deployment.close()


def test_a_gateway_that_dies_at_once_for_ever_is_tried_once_a_minute_in_the_end(world):
    world.launcher.dies_at_once = True
    world.launcher.end("gateway")
    world.watch(HOUR_S)
    # A second passes until its end is seen.
    assert world.gaps()[:7] == [3, 5, 9, 17, 33, 61, 61]
    assert set(world.gaps()[7:]) == {61}
    assert len(world.launcher.starts) <= 6 + HOUR_S / 60


def test_a_gateway_that_does_not_start_is_said_each_time_and_tried_when_due(world):
    world.launcher.fates = ["no port"] * 3
    world.launcher.end("gateway")
    told = world.watch(20)
    assert told == [
        "gateway ended; its requests are lost, it is started again in 1 s",
        "gateway did not start again: no port; the next attempt is in 2 s",
        "gateway did not start again: no port; the next attempt is in 4 s",
        "gateway did not start again: no port; the next attempt is in 8 s",
        "gateway was started again",
    ]
    assert [when for when, _ in world.launcher.starts] == [1, 3, 7, 15]
    assert world.deployment.gateways[0].pid == 4


def test_the_wait_for_the_next_attempt_begins_when_the_last_one_is_over(world):
    world.launcher.start_takes_s = 100.0
    world.launcher.fates = ["it takes too long"] * 2
    world.launcher.end("gateway")
    world.watch(10)
    assert world.gaps() == [102, 104]


def test_a_gateway_that_lived_for_a_minute_begins_anew(world):
    world.launcher.fates = ["no port"] * 3
    world.launcher.end("gateway")
    world.watch(16)
    world.watch(50)
    world.launcher.end("gateway")
    assert "started again in 16 s" in world.watch(1)[0]
    world.watch(16)
    world.watch(60)
    world.launcher.end("gateway")
    assert "started again in 1 s" in world.watch(1)[0]


def test_no_attempt_is_made_while_a_gateway_runs(world):
    world.launcher.end("gateway")
    world.watch(2)
    assert world.watch(HOUR_S) == []
    assert len(world.launcher.starts) == 1


def test_hours_of_failures_end_when_the_cause_does(world):
    world.launcher.fates = ["no memory"] * 2000
    world.launcher.end("gateway")
    told = world.watch(2010 * 60)
    assert told[-1] == "gateway was started again"
    assert len(world.launcher.starts) == 2001


def test_one_gateway_is_started_a_time_and_none_waits_for_ever():
    world = World(processes=3)
    for name in ("gateway-0", "gateway-1", "gateway-2"):
        world.launcher.end(name)
    assert len(world.watch(1)) == 3
    for count in (1, 2, 3):
        assert len(world.watch(1)) == 1
        assert len(world.launcher.starts) == count
    assert {name for _, name in world.launcher.starts} == {"gateway-0", "gateway-1", "gateway-2"}
    world.deployment.close()


def test_a_worker_that_ended_is_said_and_not_replaced(world):
    world.launcher.end("decode-0")
    assert world.watch(HOUR_S) == ["decode-0 ended; requests go on where they can"]
    assert world.launcher.starts == []


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exec 0<&-; exit 3", r"gateway ended while starting \(exit status 3\)"),
        ("read spec; exit 4", r"gateway ended while starting \(exit status 4\)"),
        ("read spec; echo what", "gateway said b'what"),
        ("read spec; echo '[1]'", "gateway said"),
        ("read spec; printf '\"\\377\"\\n'", "gateway said"),
        ("read spec; echo '{\"url\": 1}'", "gateway said"),
        ('read spec; echo \'{"error": "no port"}\'', "gateway: no port"),
    ],
)
def test_a_process_that_does_not_start_is_a_typed_error_and_forgotten(
    script, says, tmp_path, monkeypatch
):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    launcher = ProcessLauncher()
    with pytest.raises(ConfigError, match=says):
        launcher.start_gateway(SPEC)
    assert launcher.processes == []
    assert launcher.dead() == {}


def test_a_process_that_cannot_be_made_is_a_typed_error_and_forgotten(monkeypatch):
    def no_memory(*_args: object, **_options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    launcher = ProcessLauncher()
    with pytest.raises(ConfigError, match=r"gateway cannot be started: .*Cannot allocate memory"):
        launcher.start_gateway(SPEC)
    assert launcher.processes == []


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's: what a method raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("called from\nhere")
        self.cause = cause


class FakeActor:
    """Answers with what it was made with; raises it if that is an error."""

    def __init__(self, answer: object) -> None:
        self.start = SimpleNamespace(remote=lambda: answer)
        self.ping = SimpleNamespace(remote=lambda: RayError("the actor died."))


class FakeRay(ModuleType):
    """What the launcher uses of Ray."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.answer: object = (READY, "")
        self.names: dict[str, FakeActor] = {}

    def remote(self, **_options: object):
        return lambda _: SimpleNamespace(options=self._options)

    def _options(self, name: str):
        return SimpleNamespace(remote=lambda *_: self._create(name))

    def _create(self, name: str) -> FakeActor:
        if name in self.names:
            raise ValueError(f"The name {name} is already taken")
        self.names[name] = FakeActor(self.answer)
        return self.names[name]

    def wait(self, pings: list[object], timeout: float):
        return pings, []

    def get(self, answer: object, timeout: float | None = None) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self, actor: FakeActor) -> None:
        self.names = {name: other for name, other in self.names.items() if other is not actor}


@pytest.fixture
def fake_ray(monkeypatch) -> Iterator[FakeRay]:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.delitem(sys.modules, "deploy.ray_launcher", raising=False)
    yield made
    sys.modules.pop("deploy.ray_launcher", None)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RayError("the actor died.\nwhere"), "gateway did not start: the actor died$"),
        (RayError(), r"gateway did not start: RayError\(\)"),
        (RayTaskError(OSError(28, "No space left")), "gateway did not start: OSError.*No space"),
        ((b"", "no port"), "gateway: no port"),
    ],
)
def test_an_actor_that_does_not_come_up_leaves_its_name_free(fake_ray, answer, says):
    launcher = importlib.import_module("deploy.ray_launcher").RayLauncher()
    fake_ray.answer = answer
    with pytest.raises(ConfigError, match=says):
        launcher.start_gateway(SPEC)
    assert fake_ray.names == {}
    assert launcher.dead() == {}
    fake_ray.answer = (READY, "")
    assert launcher.start_gateway(SPEC).pid == 7


def test_an_actor_whose_name_is_taken_is_a_typed_error(fake_ray):
    launcher = importlib.import_module("deploy.ray_launcher").RayLauncher()
    fake_ray.names["gateway"] = FakeActor(None)
    with pytest.raises(ConfigError, match="already taken"):
        launcher.start_gateway(SPEC)
    assert list(fake_ray.names) == ["gateway"]  # it is somebody else's


def test_an_actor_that_ended_is_said_once_and_its_name_is_free(fake_ray):
    launcher = importlib.import_module("deploy.ray_launcher").RayLauncher()
    launcher.start_gateway(SPEC)
    assert launcher.dead() == {"gateway": "gateway ended: the actor died"}
    assert launcher.dead() == {}
    assert fake_ray.names == {}
