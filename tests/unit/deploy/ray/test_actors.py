"""The launcher of Ray actors, with a fake Ray: failed starts, exits, and leftover actors."""

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from deploy.base.spec import READY_TIMEOUT_S, GatewaySpec, WorkerReady, WorkerSpec
from deploy.fetching.cache import FETCH_TIMEOUT_S
from engine.config import DeviceKind, GatewayConfig, RouterConfig, WorkerConfig
from engine.control import Intent, Members
from engine.devices.settings import resolve
from engine.errors import ConfigError
from engine.messages import Role, WorkerId

SPEC = GatewaySpec(Members(1, (), Intent()), GatewayConfig(), RouterConfig(), "token")
SETTINGS = resolve(WorkerConfig(), DeviceKind.CPU)
READY = b'{"url": "http://127.0.0.1:80", "model_name": "m", "pid": 7}'
LONG_S = 2 * READY_TIMEOUT_S  # seconds; a large model may take this long to start
USE_RAY = tuple(f"deploy.ray.{name}" for name in ("actors", "launcher", "controller", "places"))
PARTS_OF_RAY: dict[str, dict[str, object]] = {  # parts of Ray that reserve no resources
    "ray.autoscaler.sdk": {"request_resources": lambda *, bundles: None},
    "ray.util.scheduling_strategies": {
        "NodeAffinitySchedulingStrategy": None,
        "PlacementGroupSchedulingStrategy": None,
    },
    "ray.util.placement_group": {
        "PlacementGroup": object,
        "get_placement_group": None,
        "placement_group": None,
        "placement_group_table": dict,
        "remove_placement_group": None,
    },
}


class RayError(Exception):
    """Ray's base error."""


class RayTaskError(RayError):
    """Ray's error for an exception in an actor's method."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("called from\nhere")
        self.cause = cause


class ActorUnavailableError(RayError):
    """Ray's error for an actor that is temporarily unreachable."""


class ActorDiedError(RayError):
    """Ray's error for an actor that has exited."""


class FakeActor:
    """An actor with a fixed answer. If the answer is an error, the actor raises it."""

    def __init__(self, answer: object) -> None:
        self.start = SimpleNamespace(remote=lambda: answer)
        self.fetch = SimpleNamespace(remote=lambda: "")
        self.limit_s = SimpleNamespace(remote=lambda: LONG_S)
        self.ping = SimpleNamespace(remote=lambda: self.pongs.pop(0) if self.pongs else self.pong)
        # the first ping succeeds, because the actor was created
        self.pongs: list[RayError | None] = [None]
        self.pong: RayError = RayError("the actor died.")
        self.described: object = ("gateway", READY)
        self.describe = SimpleNamespace(remote=lambda: self.described)
        self.stop = SimpleNamespace(remote=lambda: self.stopped)
        self.stopped: object = None
        self.drain_timeout_s = SimpleNamespace(remote=lambda: 0.0)


class FakeRay(ModuleType):
    """The part of Ray's API that the launcher uses."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(
            RayError=RayError,
            ActorDiedError=ActorDiedError,
            RayTaskError=RayTaskError,
            ActorUnavailableError=ActorUnavailableError,
        )
        self.util = SimpleNamespace(list_named_actors=self._list_named_actors)
        self.answer: object = (READY, "")
        self.made: RayError | None = None  # error raised instead of creating an actor
        self.timeouts: list[float] = []
        self.names: dict[str, FakeActor] = {}
        self.waits: list[tuple[int, float]] = []
        self.options: list[dict[str, object]] = []

    def remote(self, **_options: object):
        return lambda _: SimpleNamespace(options=self._options)

    def _options(self, name: str, **options: object):
        self.options.append(options)
        return SimpleNamespace(remote=lambda *_: self._create(name))

    def _create(self, name: str) -> FakeActor:
        if name in self.names:
            raise ValueError(f"The name {name} is already taken")
        self.names[name] = FakeActor(self.answer)
        self.names[name].pongs[0] = self.made
        return self.names[name]

    def wait(self, answers: list[object], *, num_returns: int = 1, timeout: float):
        self.waits.append((num_returns, timeout))
        return answers, []

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        if name not in self.names:
            raise ValueError(f"no actor is called {name}")
        return self.names[name]

    def _list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": "baton"} for name in self.names]

    def get(self, answer: object, timeout: float | None = None) -> object:
        if timeout is not None:
            self.timeouts.append(timeout)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self, actor: FakeActor) -> None:
        self.names = {name: other for name, other in self.names.items() if other is not actor}


@pytest.fixture
def fake_ray(monkeypatch) -> Iterator[FakeRay]:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    for name, used in PARTS_OF_RAY.items():
        part = ModuleType(name)
        vars(part).update(used)
        monkeypatch.setitem(sys.modules, name, part)
    for name in USE_RAY:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield made
    for name in USE_RAY:
        sys.modules.pop(name, None)


@pytest.fixture
def launcher(fake_ray):
    return importlib.import_module("deploy.ray.launcher").OwnRayLauncher()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RayError("the actor died.\nwhere"), "gateway did not start: the actor died$"),
        (RayError(), r"gateway did not start: RayError\(\)"),
        (RayTaskError(OSError(28, "No space left")), "gateway did not start: OSError.*No space"),
        ((b"", "no port"), "gateway: no port"),
    ],
)
def test_failed_actor_leaves_its_name_free(fake_ray, launcher, answer, says):
    fake_ray.answer = answer
    with pytest.raises(ConfigError, match=says):
        launcher.start(SPEC)
    assert fake_ray.names == {}
    assert launcher.dead() == {}
    fake_ray.answer = (READY, "")
    assert launcher.start(SPEC).pid == 7


@pytest.mark.parametrize("num_gpus", [0.0, 0.5, 1.0])
def test_ray_gives_each_worker_its_gpus(fake_ray, launcher, num_gpus):
    fake_ray.answer = (msgspec.json.encode(WorkerReady("a", 1, 1, 1, 1, 0.0)), "")
    who = (WorkerId("w"), Role.PREFILL, "m", SETTINGS, "token")
    launcher.start(WorkerSpec(*who, threads=1, num_gpus=num_gpus))
    assert fake_ray.options == [{"num_gpus": num_gpus}]


class FakeOwnRay:
    """A Ray whose session changes at each opening. Its raylet may be dead."""

    num_gcs_restarts = 0

    def __init__(self, failures: int = 0) -> None:
        self.session = 0
        self.raylet_runs = True
        self.failures = failures
        self.threads: set[threading.Thread] = set()  # threads that opened and closed this Ray

    def open(self) -> None:
        self.threads.add(threading.current_thread())
        if self.failures:
            self.failures -= 1
            raise ConfigError("no Ray")
        self.session += 1
        self.raylet_runs = True

    def close(self) -> None:
        self.threads.add(threading.current_thread())
        self.raylet_runs = False

    def use(self, launcher, monkeypatch) -> None:
        module = sys.modules["deploy.ray.launcher"]
        parts = {"gcs": True}
        monkeypatch.setattr(module, "_session_name", lambda: f"session_{self.session}")
        monkeypatch.setattr(module, "parts_of_ray", lambda _: {**parts, "raylet": self.raylet_runs})
        monkeypatch.setattr(launcher, "_open_port", lambda: None)
        launcher._ray = self
        launcher.open()


@pytest.mark.parametrize("failures", [0, 2])
def test_raylet_that_died_is_replaced_with_all_of_ray(fake_ray, launcher, monkeypatch, failures):
    own_ray = FakeOwnRay()
    own_ray.use(launcher, monkeypatch)
    fake_ray.answer = (READY, "")
    launcher.start(SPEC)
    own_ray.raylet_runs, own_ray.failures = False, failures
    for _ in range(failures):
        with pytest.raises(ConfigError, match="no Ray"):
            launcher.dead()
    assert launcher.dead() == {SPEC.name: "Ray's raylet died"}
    assert own_ray.session == 2
    assert launcher.counters()["restarts of Ray"] == 1
    assert launcher.dead() == {}
    assert fake_ray.names == {}
    assert launcher.start(SPEC).pid == 7


def test_one_thread_that_is_not_the_main_one_opens_and_closes_every_ray(
    fake_ray, launcher, monkeypatch
):
    own_ray = FakeOwnRay()
    own_ray.use(launcher, monkeypatch)
    own_ray.raylet_runs = False
    with ThreadPoolExecutor(1) as threads:
        threads.submit(launcher.dead).result()
    assert own_ray.session == 2
    launcher.close()
    launcher.close()  # undoing a start closes the launcher a second time
    [thread] = own_ray.threads
    assert thread is not threading.main_thread()


def test_call_that_ray_ends_by_a_system_exit_is_a_failed_start(fake_ray, launcher):
    fake_ray.answer = SystemExit(0)
    with pytest.raises(ConfigError, match="Ray ended meanwhile"):
        launcher.start(SPEC)


def test_closing_launcher_starts_no_ray(fake_ray, launcher, monkeypatch):
    own_ray = FakeOwnRay()
    own_ray.use(launcher, monkeypatch)
    launcher.close()
    assert launcher.dead() == {}
    assert own_ray.session == 1


def test_unplaced_actor_has_the_short_deadline(fake_ray, launcher):
    fake_ray.made = RayError("Get timed out")
    with pytest.raises(ConfigError, match="gateway did not start: Get timed out"):
        launcher.start(SPEC)
    assert fake_ray.timeouts == [READY_TIMEOUT_S]
    assert fake_ray.names == {}


@pytest.mark.parametrize(
    ("model", "has_s"),
    [
        ("/models/name", [READY_TIMEOUT_S, READY_TIMEOUT_S, LONG_S]),
        ("hf://org/name", [READY_TIMEOUT_S, FETCH_TIMEOUT_S, READY_TIMEOUT_S, LONG_S]),
    ],
)
def test_fetches_and_starts_of_large_models_have_long_deadlines(model, has_s, fake_ray, launcher):
    ready = WorkerReady("w:1", pid=7, context_len=64, num_blocks=8, block_bytes=64, start_s=0.0)
    fake_ray.answer = (msgspec.json.encode(ready), "")
    launcher.start(WorkerSpec(WorkerId("w"), Role.PREFILL, model, SETTINGS, "token", threads=1))
    assert fake_ray.timeouts == has_s


class Steps:
    """A clock that advances by a fixed step at each reading."""

    def __init__(self, step_s: float) -> None:
        self._at_s = 0.0
        self._step_s = step_s

    def now_s(self) -> float:
        self._at_s += self._step_s
        return self._at_s


@pytest.fixture
def find_controller(fake_ray, monkeypatch):
    """Returns `find_controller` for a controller that gives these answers, one every 100 s."""

    def find(answers: list[object]) -> tuple[str, int]:
        ray_controller = importlib.import_module("deploy.ray.controller")
        monkeypatch.setattr(ray_controller, "RETRY_EVERY_S", 0.0)
        monkeypatch.setattr(ray_controller, "MonotonicClock", lambda: Steps(100.0))
        actor = SimpleNamespace(ready=SimpleNamespace(remote=lambda: answers.pop(0)))
        fake_ray.names = {"controller": actor}
        return ray_controller.find_controller()

    return find


def test_unreachable_controller_has_the_short_deadline(find_controller):
    answers: list[object] = [ActorUnavailableError("away")] * 10
    with pytest.raises(ConfigError, match="cannot be reached: away"):
        find_controller(answers)
    assert len(answers) == 10 - READY_TIMEOUT_S / 100


def test_opening_controller_is_awaited_through_short_outages(find_controller):
    opens, away = ("", 7, ""), ActorUnavailableError("away")
    assert find_controller([opens, away, away] * 10 + [("http://admin", 7, "")]) == (
        "http://admin",
        7,
    )


def test_taken_actor_name_is_a_typed_error(fake_ray, launcher):
    fake_ray.names["gateway"] = FakeActor(None)
    with pytest.raises(ConfigError, match="already taken"):
        launcher.start(SPEC)
    assert list(fake_ray.names) == ["gateway"]  # an actor of another owner remains


def test_ended_actor_is_reported_once_and_frees_its_name(fake_ray, launcher):
    launcher.start(SPEC)
    assert launcher.dead() == {"gateway": "gateway ended: the actor died"}
    assert launcher.dead() == {}
    assert fake_ray.names == {}


def test_actor_ended_by_ray_is_not_killed_again(fake_ray, launcher, monkeypatch):
    launcher.start(SPEC)
    monkeypatch.setattr(fake_ray, "kill", None)
    launcher._actors._hosted["gateway"].ping = ActorDiedError("its node died.")
    assert launcher.dead() == {"gateway": "gateway ended: its node died"}
    assert launcher.running() == {}


def test_unavailable_actor_is_not_dead(fake_ray, launcher):
    launcher.start(SPEC)
    actor = fake_ray.names["gateway"]
    launcher._actors._hosted["gateway"].ping = ActorUnavailableError("later")
    assert launcher.dead() == {}
    assert fake_ray.names == {"gateway": actor}
    assert launcher.dead() == {"gateway": "gateway ended: the actor died"}


def test_leftovers_are_ended_without_a_controller(fake_ray):
    ray_controller = importlib.import_module("deploy.ray.controller")
    fake_ray.names = {name: FakeActor(None) for name in ("gateway", "gateway-1", "late")}
    fake_ray.names["gateway-1"].stopped = RayError("it does not stop")
    fake_ray.names["late"].described = RayError("it does not answer")
    ray_controller.stop_deployment()
    assert fake_ray.names == {}
    # waits for both actors at the same time
    assert [num_returns for num_returns, _ in fake_ray.waits] == [2]
    with pytest.raises(ConfigError, match="no deployment runs"):
        ray_controller.stop_deployment()


def test_leftovers_of_a_controller_are_ended_after_it(fake_ray):
    ray_controller = importlib.import_module("deploy.ray.controller")
    fake_ray.names = {name: FakeActor(None) for name in ("controller", "gateway")}
    fake_ray.names["controller"].stopped = RayError("it takes too long")
    ray_controller.stop_deployment()
    assert fake_ray.names == {}
