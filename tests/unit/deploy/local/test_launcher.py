"""The launcher of local processes: a failed start is an error, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest

from deploy.base.gpus import FoundGpus, HostGpu
from deploy.base.spec import (
    READY_TIMEOUT_S,
    Fetched,
    Fetching,
    GatewaySpec,
    Starting,
    WorkerReady,
    WorkerSpec,
)
from deploy.fetching.cache import FETCH_TIMEOUT_S
from deploy.local import process_main
from deploy.local.launcher import ProcessLauncher
from deploy.local.service_process import ServiceProcess
from engine.config import DeviceKind, GatewayConfig, RouterConfig, WorkerConfig
from engine.control import Intent, Members
from engine.devices.settings import resolve
from engine.errors import ConfigError
from engine.messages import Role, WorkerId
from tests.kits.nurseries import nursery_of_shells

SPEC = GatewaySpec(Members(1, (), Intent()), GatewayConfig(), RouterConfig(), "token")
READY = b'{"url": "http://127.0.0.1:80", "model_name": "m", "pid": 7}'
FETCHING, FETCHED = (msgspec.json.encode(each).decode() for each in (Fetching(), Fetched()))
STARTING = msgspec.json.encode(Starting(777.0)).decode()
MORE_THAN_A_PIPE_BYTES = 2**20  # more bytes than a pipe buffers without a reader


@pytest.fixture
def launcher_of() -> Iterator[Callable[[str], ProcessLauncher]]:
    """Returns a function that makes a launcher whose services are shell scripts."""
    with ExitStack() as stack:

        def launcher(script: str) -> ProcessLauncher:
            nursery = nursery_of_shells(script)
            stack.callback(nursery.close)
            return ProcessLauncher(nursery)

        yield launcher


def test_stop_during_a_start_ends_the_wait(tmp_path, launcher_of):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    launcher = launcher_of(f"echo > {begun}; read spec; exec cat")
    said = []

    def start() -> None:
        with pytest.raises(ConfigError) as caught:
            launcher.start(SPEC)
        said.append(str(caught.value))

    thread = threading.Thread(target=start)
    thread.start()
    begun.read_text()  # the process is running, and the launcher waits for it
    assert launcher.dead() == {}
    assert launcher.running() == {}
    launcher.stop("gateway", by_force=False)
    thread.join(10)
    assert len(said) == 1
    # A process that is stopped during its start gets no time to exit by itself. The stop may
    # precede the message that the process has started.
    ended = r"gateway ended while starting \(exit status (-9|unknown)\)"
    assert re.fullmatch(f"{ended}|gateway was not started: stopped", said[0])
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
def test_failed_start_is_a_typed_error_and_leaves_no_process(script, says, launcher_of):
    launcher = launcher_of(script)
    with pytest.raises(ConfigError, match=says):
        launcher.start(SPEC)
    assert launcher.processes == []
    assert launcher.dead() == {}


@pytest.mark.parametrize(
    ("says", "has_s"),
    [
        ([], [READY_TIMEOUT_S]),
        ([FETCHING, FETCHED], [READY_TIMEOUT_S, FETCH_TIMEOUT_S, READY_TIMEOUT_S]),
        ([STARTING], [READY_TIMEOUT_S, 777.0]),
        ([FETCHING, FETCHED, STARTING], [READY_TIMEOUT_S, FETCH_TIMEOUT_S, READY_TIMEOUT_S, 777.0]),
    ],
)
def test_fetches_and_starts_of_large_models_have_long_deadlines(
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
    assert launcher.start(SPEC).pid == 7
    assert timeouts == has_s
    launcher.close()


@pytest.mark.parametrize(
    ("script", "shortened", "says"),
    [
        ("read spec; exec sleep 60", "READY", r"gateway did not start in 0\.05 s"),
        # the process does not read its spec
        ("exec sleep 60", "READY", r"gateway did not start in 0\.05 s"),
        (
            f"read spec; echo '{FETCHING}'; exec sleep 60",
            "FETCH",
            r"gateway did not fetch its model in 0\.05 s",
        ),
    ],
)
def test_silent_process_is_ended_at_its_deadline(script, shortened, says, launcher_of, monkeypatch):
    monkeypatch.setattr(f"deploy.local.service_process.{shortened}_TIMEOUT_S", 0.05)
    launcher = launcher_of(script)
    with pytest.raises(ConfigError, match=says):
        launcher.start(msgspec.structs.replace(SPEC, token="x" * MORE_THAN_A_PIPE_BYTES))
    assert launcher.processes == []


class Exited(Exception):
    """Signals the exit of the process."""


def test_fetch_ends_when_its_launcher_is_gone(monkeypatch):
    def leave() -> None:
        raise Exited

    never = threading.Event()
    monkeypatch.setattr(process_main, "fetch", lambda *_: never.wait(10))
    monkeypatch.setattr(process_main, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(process_main, "leave", leave)
    theirs, ours = os.pipe()
    os.close(ours)
    with open(theirs) as stdin:
        monkeypatch.setattr(process_main.sys, "stdin", stdin)
        with pytest.raises(Exited):
            process_main._fetch_while_wanted(WORKER)
    never.set()


def test_failed_fetch_is_raised_to_the_launcher(monkeypatch):
    def fetch(*_arguments: object) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(process_main, "fetch", fetch)
    with pytest.raises(ConfigError, match="no such model"):
        process_main._fetch_while_wanted(WORKER)


def test_ended_process_is_reported_once_with_its_status(launcher_of):
    answer = READY.decode()
    launcher = launcher_of(f"read spec; echo '{answer}'; read line; exit 5")
    launcher.start(SPEC)
    process = launcher.processes[0]
    process._child.hang_up()
    process._child.wait(10)
    assert launcher.running() == {}
    assert launcher.dead() == {"gateway": "gateway ended with status 5"}
    assert launcher.dead() == {}


def test_nursery_without_an_answer_is_replaced(launcher_of, monkeypatch):
    launcher = launcher_of(f"read spec; echo '{READY.decode()}'; exec cat")
    launcher.open()
    nursery = launcher._nursery
    os.kill(nursery._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as cut:
        cut.setattr("deploy.local.service_process.FORK_TIMEOUT_S", 0.05)
        with pytest.raises(ConfigError, match=r"gateway was not started: .* no answer in 0.05 s"):
            launcher.start(SPEC)
    assert launcher.start(SPEC).pid == 7
    assert nursery.num_lost == 1
    launcher.close()


def test_impossible_fork_is_a_typed_error_and_leaves_no_process(monkeypatch):
    def no_memory(*_args: object, **_options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    launcher = ProcessLauncher()
    with pytest.raises(ConfigError, match=r"no process can be started: .*Cannot allocate memory"):
        launcher.open()
    with pytest.raises(ConfigError, match=r"gateway cannot be started: .*Cannot allocate memory"):
        launcher.start(SPEC)
    assert launcher.processes == []


def test_any_error_at_a_start_leaves_no_process(launcher_of, monkeypatch):
    def broken(*_arguments: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ServiceProcess, "_ask", broken)
    launcher = launcher_of("exec sleep 60")
    with pytest.raises(RuntimeError, match="a bug"):
        launcher.start(SPEC)
    assert launcher.processes == []


def test_closed_launcher_starts_nothing(launcher_of):
    launcher = launcher_of(f"read spec; echo '{READY.decode()}'; exec cat")
    launcher.close()
    with pytest.raises(ConfigError, match="gateway is not started: the launcher is closed"):
        launcher.start(SPEC)


WORKER = WorkerSpec(
    *(WorkerId("w"), Role.MIXED, "/model", resolve(WorkerConfig(), DeviceKind.CUDA), "token"),
    threads=1,
    num_gpus=1.0,
)
LISTENS = msgspec.json.encode(WorkerReady("a", 1, 1, 1, 1, 0.0)).decode()


def gpu_launcher(script: str, *names: str) -> tuple[ProcessLauncher, Callable[[], None]]:
    nursery = nursery_of_shells(script)
    return ProcessLauncher(
        nursery, look=lambda: FoundGpus(tuple(map(HostGpu, names)))
    ), nursery.close


def named(name: str, num_gpus: float = 1.0) -> WorkerSpec:
    return msgspec.structs.replace(WORKER, worker_id=WorkerId(name), num_gpus=num_gpus)


def test_each_worker_gets_its_gpu_and_frees_it_when_it_ends(tmp_path):
    script = f"read spec; echo $spec >> {tmp_path}/specs; echo '{LISTENS}'; exec cat"
    launcher, close = gpu_launcher(script, "GPU-a", "GPU-b")
    try:
        launcher.start(named("p"))
        launcher.start(named("d"))
        with pytest.raises(ConfigError, match="m needs 1 GPU, and this machine has 2; taken by"):
            launcher.start(named("m"))
        launcher.stop("p", by_force=True)
        launcher.start(named("m"))
        launcher.start(named("cpu", 0))
    finally:
        launcher.close()
        close()
    specs = [msgspec.json.decode(line) for line in (tmp_path / "specs").read_text().splitlines()]
    assert [(each["worker_id"], each["gpus"]) for each in specs] == [
        ("p", ["GPU-a"]),
        ("d", ["GPU-b"]),
        ("m", ["GPU-a"]),
        ("cpu", []),
    ]


def test_a_failed_start_gives_the_gpu_back():
    launcher, close = gpu_launcher("read spec; exit 3", "GPU-a")
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match="w ended while starting"):
                launcher.start(WORKER)
        assert (launcher.room(1), launcher.room(0.5)) == (1, 2)
        assert launcher.scarce(1.0) == "this machine has 1 GPU, of which a worker takes 1"
    finally:
        close()


def test_a_closed_launcher_keeps_no_gpu():
    launcher, close = gpu_launcher("exec cat", "GPU-a")
    close()
    launcher.close()
    for _ in range(2):
        with pytest.raises(ConfigError, match="the launcher is closed"):
            launcher.start(WORKER)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(("GPU-a", "GPU-b"), "GPU-a,GPU-b"), ((), ""), (None, "as it was")]
)
def test_a_worker_sees_its_own_gpus_only(gpus, expected):
    environment = {"CUDA_VISIBLE_DEVICES": "as it was"}
    process_main.limit_gpus(msgspec.structs.replace(WORKER, gpus=gpus), environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == expected
    process_main.limit_gpus(SPEC, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == expected


PROGRAM = """
import atexit, threading
from deploy.local.leaving import end

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "registered")
threading.Thread(target=threading.Event().wait).start()  # would be waited for
print("said")
end(7)
"""


def test_a_process_ends_without_being_taken_apart():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (7, b"said\nregistered\n")
