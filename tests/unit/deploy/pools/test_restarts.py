"""What ends is started again, later each time; launchers forget what does not start."""

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from deploy.local import process_main
from deploy.local.launcher import ProcessLauncher
from deploy.local.service_process import ServiceProcess
from deploy.model_source import FETCH_TIMEOUT_S
from deploy.pools.restarts import Restarts
from deploy.services.model import has_to_fetch
from deploy.services.spec import (
    READY_TIMEOUT_S,
    Fetched,
    Fetching,
    GatewaySpec,
    WorkerReady,
    WorkerSpec,
)
from deploy.services.thread import LateStart, ServiceThread
from engine.config import GatewayConfig, RouterConfig, WorkerConfig
from engine.control import Intent, Members, Version
from engine.errors import ConfigError
from engine.messages import Role, WorkerId
from tests.kits.nurseries import nursery_of_shells

SPEC = GatewaySpec(Members(1, (), Intent()), GatewayConfig(), RouterConfig(), "token")
READY = b'{"url": "http://127.0.0.1:80", "model_name": "m", "pid": 7}'
FETCHING, FETCHED = (msgspec.json.encode(each).decode() for each in (Fetching(), Fetched()))
MORE_THAN_A_PIPE_BYTES = 2**20  # takes, unless somebody reads
HOUR_S = 3600
USE_RAY = ("deploy.ray.actors", "deploy.ray.launcher", "deploy.ray.controller", "deploy.ray.places")
PARTS_OF_RAY: dict[str, dict[str, object]] = {  # nothing is reserved
    "ray.autoscaler.sdk": {"request_resources": lambda *, bundles: None},
    "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": None},
    "ray.util.placement_group": {
        "PlacementGroup": object,
        "get_placement_group": None,
        "placement_group": None,
        "placement_group_table": dict,
        "remove_placement_group": None,
    },
}


class Tries:
    """A service that is started whenever it is due, once a second from 0 on."""

    def __init__(self) -> None:
        self.restarts = Restarts()
        self.now_s = 0.0
        self.starts: list[float] = []

    def watch(self, seconds: int, *, dies_after_s: float | None, takes_s: float = 0.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            if self.restarts.is_due("gateway", self.now_s):
                self.starts.append(self.now_s)
                self.now_s += takes_s
                if dies_after_s is None:
                    self.restarts.failed("gateway", self.now_s)
                else:
                    self.restarts.started("gateway", self.now_s)
                    self.now_s += dies_after_s
                    self.restarts.failed("gateway", self.now_s)
            self.now_s += 1

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.starts)]


def test_what_dies_at_once_for_ever_is_tried_once_a_minute_in_the_end():
    tries = Tries()
    tries.watch(HOUR_S, dies_after_s=0.0)
    assert tries.gaps()[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(tries.gaps()[7:]) == {60}
    assert tries.restarts.is_looping("gateway")


def test_what_does_not_start_is_tried_as_seldom():
    tries = Tries()
    tries.watch(20, dies_after_s=None)
    assert tries.starts == [0, 1, 3, 7, 15]


def test_the_wait_for_the_next_attempt_begins_when_the_last_one_is_over():
    tries = Tries()
    tries.watch(300, dies_after_s=None, takes_s=100.0)
    assert tries.gaps() == [101, 102]


def test_what_lived_for_a_minute_begins_anew():
    tries = Tries()
    tries.watch(30, dies_after_s=0.0)
    assert tries.restarts.failed("gateway", tries.now_s) == 32
    tries.restarts.started("gateway", 1000.0)
    assert tries.restarts.failed("gateway", 1059.0) == 60
    tries.restarts.started("gateway", 2000.0)
    assert tries.restarts.failed("gateway", 2060.0) == 1
    assert not tries.restarts.is_looping("gateway")


def test_what_is_forgotten_or_was_never_known_may_be_started():
    restarts = Restarts()
    assert restarts.is_due("other", 0.0)
    restarts.failed("gateway", 0.0)
    assert not restarts.is_due("gateway", 0.5)
    restarts.forget("gateway")
    assert restarts.is_due("gateway", 0.5)
    assert restarts.num_failed("gateway") == 0


@pytest.fixture
def launcher_of() -> Iterator[Callable[[str], ProcessLauncher]]:
    """Makes one whose services are shell scripts."""
    with ExitStack() as stack:

        def launcher(script: str) -> ProcessLauncher:
            nursery = nursery_of_shells(script)
            stack.callback(nursery.close)
            return ProcessLauncher(nursery)

        yield launcher


def test_a_process_that_is_stopped_while_it_starts_does_not_keep_anybody_waiting(
    tmp_path, launcher_of
):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    launcher = launcher_of(f"echo > {begun}; read spec; exec cat")
    said = []

    def start() -> None:
        with pytest.raises(ConfigError) as caught:
            launcher.start_gateway(SPEC)
        said.append(str(caught.value))

    thread = threading.Thread(target=start)
    thread.start()
    begun.read_text()  # it runs, and is waited for
    assert launcher.dead() == {}
    assert launcher.running() == {}
    launcher.stop("gateway", by_force=False)
    thread.join(10)
    assert len(said) == 1
    # Who is stopped before it was heard to have started is not waited for.
    assert re.fullmatch(r"gateway ended while starting \(exit status (-9|unknown)\)", said[0])
    assert launcher.processes == []


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
def test_a_process_that_does_not_start_is_a_typed_error_and_forgotten(script, says, launcher_of):
    launcher = launcher_of(script)
    with pytest.raises(ConfigError, match=says):
        launcher.start_gateway(SPEC)
    assert launcher.processes == []
    assert launcher.dead() == {}


@pytest.mark.parametrize(
    ("says", "has_s"),
    [
        ([], [READY_TIMEOUT_S]),
        ([FETCHING, FETCHED], [READY_TIMEOUT_S, FETCH_TIMEOUT_S, READY_TIMEOUT_S]),
    ],
)
def test_who_fetches_a_model_has_long_for_that_and_for_nothing_else(
    says, has_s, launcher_of, monkeypatch
):
    timeouts: list[float] = []
    timer = threading.Timer

    def noted(timeout_s: float, end: Callable[[], None]) -> threading.Timer:
        timeouts.append(timeout_s)
        return timer(timeout_s, end)

    monkeypatch.setattr(threading, "Timer", noted)
    lines = "".join(f"echo '{line}'; " for line in [*says, READY.decode()])
    launcher = launcher_of(f"read spec; {lines} exec cat")
    assert launcher.start_gateway(SPEC).pid == 7
    assert timeouts == has_s
    launcher.close()


@pytest.mark.parametrize(
    ("script", "shortened", "says"),
    [
        ("read spec; exec sleep 60", "READY", r"gateway did not start in 0\.05 s"),
        ("exec sleep 60", "READY", r"gateway did not start in 0\.05 s"),  # and reads no spec
        (
            f"read spec; echo '{FETCHING}'; exec sleep 60",
            "FETCH",
            r"gateway did not fetch its model in 0\.05 s",
        ),
    ],
)
def test_a_process_that_keeps_silent_for_too_long_is_ended(
    script, shortened, says, launcher_of, monkeypatch
):
    monkeypatch.setattr(f"deploy.local.service_process.{shortened}_TIMEOUT_S", 0.05)
    launcher = launcher_of(script)
    with pytest.raises(ConfigError, match=says):
        launcher.start_gateway(msgspec.structs.replace(SPEC, token="x" * MORE_THAN_A_PIPE_BYTES))
    assert launcher.processes == []


@pytest.mark.parametrize(
    ("kind", "model", "has_to"),
    [
        ("worker", "hf://org/name", True),
        ("worker", "s3://models/name", True),
        ("worker", "/models/name", False),
        ("gateway", "hf://org/name", False),
    ],
)
def test_only_a_worker_whose_model_is_elsewhere_has_to_fetch(kind, model, has_to):
    version = Version(model=model)
    spec = msgspec.structs.replace(SPEC, members=Members(1, (), Intent((version,))))
    worker = WorkerSpec(WorkerId("w"), Role.PREFILL, model, WorkerConfig(), "token", threads=1)
    encoded = msgspec.json.encode(worker if kind == "worker" else spec)
    assert has_to_fetch(kind, encoded) is has_to


class Exited(Exception):
    """Instead of an end of the process."""


def test_who_fetches_a_model_that_nobody_waits_for_any_more_ends(monkeypatch):
    def exit_now(_status: int) -> None:
        raise Exited

    never = threading.Event()
    monkeypatch.setattr(process_main, "fetch", lambda *_: never.wait(10))
    monkeypatch.setattr(process_main, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(process_main.os, "_exit", exit_now)
    theirs, ours = os.pipe()
    os.close(ours)
    with open(theirs) as stdin:
        monkeypatch.setattr(process_main.sys, "stdin", stdin)
        with pytest.raises(Exited):
            process_main._fetch_while_wanted("worker", b"")
    never.set()


def test_what_is_wrong_with_a_model_is_raised_where_it_is_waited_for(monkeypatch):
    def fetch(*_arguments: object) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(process_main, "fetch", fetch)
    with pytest.raises(ConfigError, match="no such model"):
        process_main._fetch_while_wanted("worker", b"")


def test_a_process_that_ends_is_named_once_with_its_exit_status(launcher_of):
    answer = READY.decode()
    launcher = launcher_of(f"read spec; echo '{answer}'; read line; exit 5")
    launcher.start_gateway(SPEC)
    process = launcher.processes[0]
    process._child.hang_up()
    process._child.wait(10)
    assert launcher.running() == {}
    assert launcher.dead() == {"gateway": "gateway ended with status 5"}
    assert launcher.dead() == {}


def test_a_nursery_that_gives_no_answer_is_replaced(launcher_of, monkeypatch):
    launcher = launcher_of(f"read spec; echo '{READY.decode()}'; exec cat")
    launcher.open()
    nursery = launcher._nursery
    os.kill(nursery._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as hurried:
        hurried.setattr("deploy.local.service_process.FORK_TIMEOUT_S", 0.05)
        with pytest.raises(ConfigError, match=r"gateway was not started: .* no answer in 0.05 s"):
            launcher.start_gateway(SPEC)
    assert launcher.start_gateway(SPEC).pid == 7
    assert nursery.num_lost == 1
    launcher.close()


def test_a_process_that_cannot_be_made_is_a_typed_error_and_forgotten(monkeypatch):
    def no_memory(*_args: object, **_options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    launcher = ProcessLauncher()
    with pytest.raises(ConfigError, match=r"no process can be started: .*Cannot allocate memory"):
        launcher.open()
    with pytest.raises(ConfigError, match=r"gateway cannot be started: .*Cannot allocate memory"):
        launcher.start_gateway(SPEC)
    assert launcher.processes == []


def test_a_process_is_ended_and_forgotten_whatever_goes_wrong_at_its_start(
    launcher_of, monkeypatch
):
    def broken(*_arguments: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ServiceProcess, "_ask", broken)
    launcher = launcher_of("exec sleep 60")
    with pytest.raises(RuntimeError, match="a bug"):
        launcher.start_gateway(SPEC)
    assert launcher.processes == []


def test_a_launcher_that_was_closed_starts_nothing(launcher_of):
    launcher = launcher_of(f"read spec; echo '{READY.decode()}'; exec cat")
    launcher.close()
    with pytest.raises(ConfigError, match="gateway is not started: the launcher is closed"):
        launcher.start_gateway(SPEC)


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's: what a method raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("called from\nhere")
        self.cause = cause


class ActorUnavailableError(RayError):
    """As Ray's."""


class ActorDiedError(RayError):
    """As Ray's."""


class FakeActor:
    """Answers with what it was made with; raises it if that is an error."""

    def __init__(self, answer: object) -> None:
        self.start = SimpleNamespace(remote=lambda: answer)
        self.fetch = SimpleNamespace(remote=lambda: "")
        self.ping = SimpleNamespace(remote=lambda: self.pongs.pop(0) if self.pongs else self.pong)
        self.pongs: list[RayError | None] = [None]  # the first ones: it is made
        self.pong: RayError = RayError("the actor died.")
        self.described: object = ("gateway", READY)
        self.describe = SimpleNamespace(remote=lambda: self.described)
        self.stop = SimpleNamespace(remote=lambda: self.stopped)
        self.stopped: object = None
        self.drain_timeout_s = SimpleNamespace(remote=lambda: 0.0)


class FakeRay(ModuleType):
    """What the launcher uses of Ray."""

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
        self.made: RayError | None = None  # instead of an actor
        self.timeouts: list[float] = []
        self.names: dict[str, FakeActor] = {}
        self.waits: list[tuple[int, float]] = []

    def remote(self, **_options: object):
        return lambda _: SimpleNamespace(options=self._options)

    def _options(self, name: str, **_options: object):
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
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    fake_ray.answer = answer
    with pytest.raises(ConfigError, match=says):
        launcher.start_gateway(SPEC)
    assert fake_ray.names == {}
    assert launcher.dead() == {}
    fake_ray.answer = (READY, "")
    assert launcher.start_gateway(SPEC).pid == 7


def test_an_actor_that_never_comes_to_its_place_is_not_waited_for_as_one_that_fetches(fake_ray):
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    fake_ray.made = RayError("Get timed out")
    with pytest.raises(ConfigError, match="gateway did not start: Get timed out"):
        launcher.start_gateway(SPEC)
    assert fake_ray.timeouts == [READY_TIMEOUT_S]
    assert fake_ray.names == {}


@pytest.mark.parametrize(
    ("model", "has_s"),
    [
        ("/models/name", [READY_TIMEOUT_S, READY_TIMEOUT_S]),
        ("hf://org/name", [READY_TIMEOUT_S, FETCH_TIMEOUT_S, READY_TIMEOUT_S]),
    ],
)
def test_an_actor_is_given_long_where_it_fetches_a_model(model, has_s, fake_ray):
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    ready = WorkerReady("w:1", pid=7, context_len=64, num_blocks=8, block_bytes=64, start_s=0.0)
    fake_ray.answer = (msgspec.json.encode(ready), "")
    launcher.start_worker(
        WorkerSpec(WorkerId("w"), Role.PREFILL, model, WorkerConfig(), "token", threads=1)
    )
    assert fake_ray.timeouts == has_s


class Steps:
    """A clock that goes on by so much whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self._at_s = 0.0
        self._step_s = step_s

    def now_s(self) -> float:
        self._at_s += self._step_s
        return self._at_s


@pytest.fixture
def find_controller(fake_ray, monkeypatch):
    """As `deploy.ray.controller`'s, of a controller that answers so, once each 100 seconds."""

    def find(answers: list[object]) -> tuple[str, int]:
        ray_controller = importlib.import_module("deploy.ray.controller")
        monkeypatch.setattr(ray_controller, "RETRY_EVERY_S", 0.0)
        monkeypatch.setattr(ray_controller, "MonotonicClock", lambda: Steps(100.0))
        actor = SimpleNamespace(ready=SimpleNamespace(remote=lambda: answers.pop(0)))
        fake_ray.names = {"controller": actor}
        return ray_controller.find_controller()

    return find


def test_a_controller_that_cannot_be_reached_is_not_waited_for_as_one_that_opens(find_controller):
    answers: list[object] = [ActorUnavailableError("away")] * 10
    with pytest.raises(ConfigError, match="cannot be reached: away"):
        find_controller(answers)
    assert len(answers) == 10 - READY_TIMEOUT_S / 100


def test_a_controller_that_opens_is_waited_for_and_may_be_away_now_and_then(find_controller):
    opens, away = ("", 7, ""), ActorUnavailableError("away")
    assert find_controller([opens, away, away] * 10 + [("http://admin", 7, "")]) == (
        "http://admin",
        7,
    )


def test_an_actor_whose_name_is_taken_is_a_typed_error(fake_ray):
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    fake_ray.names["gateway"] = FakeActor(None)
    with pytest.raises(ConfigError, match="already taken"):
        launcher.start_gateway(SPEC)
    assert list(fake_ray.names) == ["gateway"]  # it is somebody else's


def test_an_actor_that_ended_is_said_once_and_its_name_is_free(fake_ray):
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    launcher.start_gateway(SPEC)
    assert launcher.dead() == {"gateway": "gateway ended: the actor died"}
    assert launcher.dead() == {}
    assert fake_ray.names == {}


def test_an_actor_that_ray_has_ended_is_not_ended_again(fake_ray, monkeypatch):
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    launcher.start_gateway(SPEC)
    monkeypatch.setattr(fake_ray, "kill", None)
    launcher._actors._pings["gateway"] = ActorDiedError("its node died.")
    assert launcher.dead() == {"gateway": "gateway ended: its node died"}
    assert launcher.running() == {}


def test_an_actor_that_is_not_reached_at_the_moment_is_not_dead(fake_ray):
    launcher = importlib.import_module("deploy.ray.launcher").OwnRayLauncher()
    launcher.start_gateway(SPEC)
    actor = fake_ray.names["gateway"]
    launcher._actors._pings["gateway"] = ActorUnavailableError("later")
    assert launcher.dead() == {}
    assert fake_ray.names == {"gateway": actor}
    assert launcher.dead() == {"gateway": "gateway ended: the actor died"}


def test_what_is_left_is_ended_also_where_no_controller_is(fake_ray):
    ray_controller = importlib.import_module("deploy.ray.controller")
    fake_ray.names = {name: FakeActor(None) for name in ("gateway", "gateway-1", "late")}
    fake_ray.names["gateway-1"].stopped = RayError("it does not stop")
    fake_ray.names["late"].described = RayError("it does not answer")
    ray_controller.stop_deployment()
    assert fake_ray.names == {}
    assert [num_returns for num_returns, _ in fake_ray.waits] == [2]  # both at once
    with pytest.raises(ConfigError, match="no deployment runs"):
        ray_controller.stop_deployment()


def test_what_a_controller_does_not_end_is_ended_after_it(fake_ray):
    ray_controller = importlib.import_module("deploy.ray.controller")
    fake_ray.names = {name: FakeActor(None) for name in ("controller", "gateway")}
    fake_ray.names["controller"].stopped = RayError("it takes too long")
    ray_controller.stop_deployment()
    assert fake_ray.names == {}


def test_a_service_that_takes_too_long_to_open_is_a_typed_error():
    class Slow:
        drain_timeout_s = 0.0

        async def open(self) -> None:
            await asyncio.get_running_loop().create_future()

        async def close(self) -> None:
            pass

    thread = ServiceThread(Slow(), "slow", open_timeout_s=0.01)
    with pytest.raises(LateStart, match=r"did not start in 0\.01 s"):
        thread.open()
    thread.close()
