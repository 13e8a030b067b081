"""Runs `baton serve` as a user does: starts it, reads its URL, and ends it with all its processes.

`operated` also sends an operator's orders through the admin API, and lists the processes.
"""

import os
import queue
import re
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import aiohttp
import msgspec

from bench.client.stream import http_session
from bench.common.background import PROC
from bench.common.report import Scalar
from bench.common.waiting import holds_within
from bench.processes.driven import ChildProcess
from engine.clock import Clock, MonotonicClock
from engine.config import PlannerMode
from engine.errors import BatonError
from engine.messages import Role

BATON = "deploy.commands.main"  # the Python module of the command
START_TIMEOUT_S = 120.0
# the command ends gateways, then workers, each within 30 s; the rest is a reserve
STOP_TIMEOUT_S = 90.0
SERVING = re.compile(r"serving \S+ at (http://\S+)")
NUM_LAST_LINES = 6

Options = Mapping[str, Scalar]  # options of the command, by flag


class ServerFailed(BatonError):
    """`baton serve` did not start. The message contains its last lines of output."""


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """A running `baton serve`. A child of process `pid` forks all services; each service leads a
    session.
    """

    url: str
    pid: int

    def sessions(self) -> list[int]:
        """Returns the session ids of all services."""
        return [pid for kind in ("gateway", "worker") for pid in self.services(kind)]

    def services(self, kind: str, proc: Path = PROC) -> list[int]:
        """Returns the session ids of the gateways or of the workers. Empty on systems without
        /proc.
        """
        found = []
        for path in proc.glob("[0-9]*"):
            with suppress(OSError, IndexError, ValueError):  # the process may have ended
                name, parent = _name_and_parent(path)
                if name == f"baton-{kind}" and _name_and_parent(proc / str(parent))[1] == self.pid:
                    found.append(int(path.name))
        return sorted(found)


def free_port() -> int:
    """Returns a port on which no process listens at present."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def kill_at_once(deployment: ServedDeployment, proc: Path = PROC) -> None:
    """Kills the command and all its descendants with SIGKILL."""
    children: dict[int, list[int]] = {}
    for path in proc.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):  # the process may have ended
            children.setdefault(_name_and_parent(path)[1], []).append(int(path.name))
    found = [deployment.pid]
    for pid in found:  # the loop appends children to the list
        found += children.get(pid, [])
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _name_and_parent(process: Path) -> tuple[str, int]:
    """Returns a process's name and its parent's id. Raises OSError, IndexError or ValueError if the
    process has ended.
    """
    before, _, after = (process / "stat").read_text().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])


@contextmanager
def serving(
    checkpoint: Path,
    options: Options,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[ServedDeployment]:
    """Runs `baton serve` during the context, with the process launcher and a free port.

    `environment` is added to our environment. At the end of the context all its processes have
    ended. Raises ServerFailed.
    """
    flags: Options = {"--launcher": "process", "--port": 0, **options}
    serve = [sys.executable, "-m", BATON, "serve", str(checkpoint)]
    # lines of output; None marks the end
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    child = ChildProcess(
        [*serve, *(str(text) for pair in flags.items() for text in pair)],
        on_stderr=lines.put,
        has_stdin=False,
        # wide enough to print the URL in one line
        environment={**os.environ, "COLUMNS": "200", **environment},
    )
    try:
        yield ServedDeployment(_url(lines, start_timeout_s), child.pid)
    finally:
        _end(child)


def _url(lines: "queue.SimpleQueue[str | None]", start_timeout_s: float) -> str:
    """Waits for the line of output with the server's URL, and returns the URL. Raises
    ServerFailed.
    """
    clock = MonotonicClock()
    end_s = clock.now_s() + start_timeout_s
    last: deque[str] = deque(maxlen=NUM_LAST_LINES)
    while True:
        try:
            line = lines.get(timeout=max(0.0, end_s - clock.now_s()))
        except queue.Empty:
            raise ServerFailed(f"baton serve did not start in {start_timeout_s:g} s") from None
        if line is None:
            raise ServerFailed(f"baton serve did not start: {' '.join(' '.join(last).split())}")
        last.append(line)
        if (found := SERVING.search(line)) is not None:
            return found[1]


def _end(child: ChildProcess) -> None:
    """Interrupts the command, waits for its end, then kills all of its processes that still run."""
    # read before the parent ends, because the parent identifies them
    sessions = ServedDeployment("", child.pid).sessions()
    try:
        with suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGINT)
        child.ends_within(STOP_TIMEOUT_S)
    finally:
        for session in sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        child.kill()


MARK = "BATON_CHAOS_MARK"
STARTED_BY = "BATON_CHAOS_STARTED_BY"  # variable with the bench's process id
ORDER_TIMEOUT_S = 5.0
PROGRAMS_OF_RAY = {"gcs": "gcs/gcs_server", "raylet": "raylet/raylet"}
WHOLE_WITHIN_S = 60.0  # seconds in which all workers must be back and idle
STEADY_S = 2.5  # seconds for which pools must be unchanged: workers report once per second


class OrderFailed(BatonError):
    """The controller refused an order. The message has the controller's reason."""


class SeenWorker(msgspec.Struct, frozen=True):
    """One worker, as the admin API describes it."""

    worker_id: str
    role: Role | None
    target: Role | None
    state: str
    is_connected: bool
    pid: int | None
    waiting_seqs: int
    running_seqs: int
    open_leases: int
    num_blocks: int
    free_blocks: int  # free blocks, including cached ones

    @property
    def works(self) -> bool:
        """Returns True if the worker serves requests in its role."""
        return self.state == "serving" and self.is_connected and self.role is self.target

    @property
    def num_seqs(self) -> int:
        """Returns the number of the worker's sequences."""
        return self.waiting_seqs + self.running_seqs


class SeenGateway(msgspec.Struct, frozen=True):
    """A gateway process, as the admin API describes it. `missing` says what it still needs to
    serve.
    """

    name: str
    pid: int | None
    state: str
    missing: str | None
    members_version: int

    @property
    def works(self) -> bool:
        """Returns True if the gateway accepts and serves connections."""
        return self.state == "serving" and self.missing is None


class SeenPools(msgspec.Struct, frozen=True):
    """The pools, as the admin API describes them."""

    settled: bool
    version: int
    workers: list[SeenWorker]
    gateways: list[SeenGateway]
    counters: dict[str, int] = {}
    troubles: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, SeenWorker]:
        """Returns the workers by their id."""
        return {worker.worker_id: worker for worker in self.workers}

    @property
    def is_idle(self) -> bool:
        """Returns True if no worker has a sequence, a block in use, or a lease."""
        return self.leaked == (0, 0) and not any(worker.num_seqs for worker in self.workers)

    @property
    def leaked(self) -> tuple[int, int]:
        """Returns the numbers of leaked blocks and of open leases of idle workers. A block is
        leaked if it is neither free nor cached.

        If a pool reports more free blocks than it has, the surplus counts as leaked too.
        """
        blocks = sum(abs(worker.num_blocks - worker.free_blocks) for worker in self.workers)
        return blocks, sum(worker.open_leases for worker in self.workers)


NOTHING = SeenPools(settled=False, version=-1, workers=[], gateways=[])


class _Access(msgspec.Struct):
    admin_url: str
    key: str


class OperatedDeployment:
    """The processes of a deployment on this machine. Orders can be sent while it is `connected`."""

    def __init__(self, serve: Callable[[], tuple[ServedDeployment, "_Access"]], mark: str) -> None:
        """Sets up the deployment. `serve` starts the command, and may be called again after the
        command's end.
        """
        self._serve = serve
        self.served, self._access = serve()
        self._mark = mark
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Returns the URL of the gateways."""
        return self.served.url

    @property
    def pid(self) -> int:
        """Returns the process id of the command, which is the controller."""
        return self.served.pid

    @asynccontextmanager
    async def connected(
        self, timeout_s: float, *, reuses_connections: bool = True
    ) -> AsyncIterator[aiohttp.ClientSession]:
        """Opens an HTTP session for orders. The caller may use the session for its requests."""
        async with http_session(timeout_s, reuses_connections=reuses_connections) as session:
            self._session = session
            yield session

    def start_again(self) -> None:
        """Starts the command again with the same options, after its end. Raises ServerFailed."""
        self.served, self._access = self._serve()

    async def check(self) -> SeenPools:
        """Returns the pools as the controller sees them, or `NOTHING` if the controller does not
        answer.
        """
        try:
            return msgspec.json.decode(await self._call("GET", "/v1/pools"), type=SeenPools)
        except OrderFailed:
            return NOTHING

    async def flip(self, worker: str, role: Role) -> None:
        """Orders a worker to change its role. Raises OrderFailed."""
        await self._call("POST", f"/v1/workers/{worker}/flip", {"role": str(role)})

    async def drain(self, worker: str) -> None:
        """Orders a worker to drain. Raises OrderFailed."""
        await self._call("POST", f"/v1/workers/{worker}/drain")

    async def set_pools(self, prefill: int, decode: int) -> None:
        """Orders the sizes of the pools. Raises OrderFailed."""
        await self._call("POST", "/v1/pools", {"prefill": prefill, "decode": decode})

    async def set_planner(self, mode: PlannerMode) -> None:
        """Sets the planner's mode. Raises OrderFailed."""
        await self._call("POST", "/v1/planner", {"mode": mode})

    async def _call(self, method: str, path: str, body: object = None) -> bytes:
        assert self._session is not None
        try:
            async with self._session.request(
                method,
                f"{self._access.admin_url}{path}",
                data=None if body is None else msgspec.json.encode(body),
                headers={"Authorization": f"Bearer {self._access.key}"},
                timeout=aiohttp.ClientTimeout(total=ORDER_TIMEOUT_S),
            ) as response:
                answer = await response.read()
                if response.status >= 300:
                    raise OrderFailed(f"{response.status}: {answer[:300].decode()}")
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OrderFailed(str(error) or type(error).__name__) from error

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Sends a signal to a process of this deployment. Returns False if the process has
        ended.
        """
        if pid not in (self.pid, *self.served.sessions()) and pid not in self.marked():
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def is_gone(self, pid: int, proc: Path = PROC) -> bool:
        """Returns True if a process has ended or is a zombie."""
        try:
            return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def marked(self, proc: Path = PROC) -> dict[int, str]:
        """Returns the command lines of the deployment's live processes, by process id."""
        found = {}
        mark = f"{MARK}={self._mark}".encode()
        for path in proc.glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(path.name)] = command.strip()
            except OSError:  # the process has ended, or belongs to another user
                continue
        return found

    def part_of_ray(self, part: str) -> int | None:
        """Returns the process id of Ray's `gcs` or `raylet`."""
        program = PROGRAMS_OF_RAY[part]
        pids = (p for p, line in self.marked().items() if line.split(" ", 1)[0].endswith(program))
        return next(pids, None)

    def interrupt(self) -> None:
        """Interrupts the command like Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def has_ended(self) -> bool:
        """Returns True if the command has ended. Its parent must still reap the process."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, look) is not None


@contextmanager
def operated(
    checkpoint: Path, options: Options, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[OperatedDeployment]:
    """Runs `baton serve` like `serving`, and marks its processes by an environment variable. Raises
    ServerFailed.
    """
    with TemporaryDirectory(prefix="baton-") as run_dir:
        mark = secrets.token_hex(8)
        marks = {MARK: mark, STARTED_BY: str(os.getpid()), "BATON_RUN_DIR": run_dir}
        with ExitStack() as stack:

            def serve() -> tuple[ServedDeployment, _Access]:
                started = serving(checkpoint, options, {**environment, **marks})
                served = stack.enter_context(started)
                file = Path(run_dir) / f"{served.pid}.json"
                return served, msgspec.json.decode(file.read_bytes(), type=_Access)

            yield OperatedDeployment(serve, mark)


async def settle(
    deployment: OperatedDeployment,
    is_whole: Callable[[SeenPools], bool],
    clock: Clock,
    *,
    steady_s: float = 0.0,
) -> None:
    """Waits until the pools have been whole for `steady_s`, at most `WHOLE_WITHIN_S`."""
    since_s: float | None = None

    async def is_steady() -> bool:
        nonlocal since_s
        if not is_whole(await deployment.check()):
            since_s = None
        elif since_s is None:
            since_s = clock.now_s()
        return since_s is not None and clock.now_s() - since_s >= steady_s

    await holds_within(is_steady, WHOLE_WITHIN_S, clock)
