"""Starts workers and gateways, and sees when one dies: as plain processes here, on Ray in
`ray_launcher`.

A launcher may be asked from several threads at once: a start takes seconds, and nothing else waits
for it.
"""

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from deploy.local.nursery import Child, NoChild, Nursery
from deploy.model_source import FETCH_TIMEOUT_S
from deploy.pools.placement import LEAST_ROOM
from deploy.processes import (
    READY_TIMEOUT_S,
    Fetched,
    Fetching,
    GatewayReady,
    GatewaySpec,
    WorkerReady,
    WorkerSpec,
)
from engine.clock import MonotonicClock
from engine.control import Pools
from engine.errors import ConfigError

STOP_TIMEOUT_S = 30.0  # a gateway has its drain beside
HURRIED_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.2  # whether there is a hurry
FORK_TIMEOUT_S = 120.0  # of which a nursery imports, from a cold disk, most

_FETCHING = msgspec.json.encode(Fetching()) + b"\n"
_FETCHED = msgspec.json.encode(Fetched()) + b"\n"

T = TypeVar("T")


class Launcher(Protocol):
    """Where services run. Gateways are stopped before workers."""

    def open(self) -> None:
        """Prepares to start services."""
        ...

    def room(self, num_gpus: float) -> int:
        """How many workers there can be now, each with so many GPUs. Nodes may come and go.

        Quick enough to be asked every second.
        """
        ...

    def scarce(self, num_gpus: float) -> str:
        """What sets that limit, for an operator to read."""
        ...

    def keep_places(self, names: Collection[str]) -> None:
        """Of workers that died, those with these names will be started again, and no others.

        What is reserved for others is given up. Quick, where there is none of that.
        """
        ...

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Asks for nodes, so that there is room for so many workers in all, when they have come.

        `wanted` says of which roles, and may be fewer than these for now.
        Replaces what was asked for before; 0 takes it back. Nothing is promised: `room` tells.
        """
        ...

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker and waits until it listens. Raises ConfigError; then nothing is left."""
        ...

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway and waits until it listens. Raises ConfigError; then nothing is left."""
        ...

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends a service, also while it starts; returns when nothing of it is left.

        Its name is free then. By force it is not asked.
        """
        ...

    def running(self) -> Mapping[str, WorkerReady | GatewayReady]:
        """Services that were started, by this launcher or the one before it, and run."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What went wrong here so far and was got over, by name."""
        ...

    def dead(self) -> dict[str, str]:
        """Services that ended by themselves since the last call: by name, how each ended.

        Their names are free again.
        """
        ...

    def close(self) -> None:
        """Stops everything that was started; returns when nothing of it is left."""
        ...

    def hurry(self) -> None:
        """Has `close` wait for no answer any more; from another thread, or before."""
        ...


class ServiceProcess:
    """One process of a nursery, which is what `deploy.local.process_main` is."""

    def __init__(self, name: str, kind: str, nursery: Nursery) -> None:
        self.name = name
        self.kind = kind
        self.ready: Any = None  # its answer, when it has given it
        self._nursery = nursery
        self._child: Child | None = None
        self._is_wanted = True
        self._lock = threading.Lock()  # a child is asked for, or not wanted any more: one is first

    def start(self, spec: WorkerSpec | GatewaySpec, ready_type: type[T]) -> T:
        """Starts the process and waits for its answer. Raises ConfigError."""
        try:
            with self._lock:
                if not self._is_wanted:
                    raise ConfigError(f"{self.name} is not wanted any more")
                self._child = child = self._nursery.fork(self.kind)
        except (OSError, RuntimeError) as error:  # no memory, descriptors, processes or threads
            raise ConfigError(f"{self.name} cannot be started: {error}") from error
        line = self._ask(child, msgspec.json.encode(spec) + b"\n")
        try:
            answer = msgspec.json.decode(line, type=dict[str, Any])
            if "error" in answer:
                raise ConfigError(f"{self.name}: {answer['error']}")
            ready = msgspec.convert(answer, ready_type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.name} said {line[:200]!r} while starting") from error
        self.ready = ready
        return ready

    def _ask(self, child: Child, request: bytes) -> bytes:
        """The line that it answers with. Raises ConfigError if it ends without."""
        try:
            child.await_start(FORK_TIMEOUT_S)
        except NoChild as error:
            raise ConfigError(f"{self.name} was not started: {error}") from error
        except TimeoutError as error:
            self._nursery.give_up()
            raise ConfigError(
                f"{self.name} was not started: the nursery gave no answer in {FORK_TIMEOUT_S:g} s"
            ) from error
        line = b""
        with self._within(READY_TIMEOUT_S, child, "start"):
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        if line == _FETCHING:
            with self._within(FETCH_TIMEOUT_S, child, "fetch its model"):
                line = child.stdout.readline()
            if line == _FETCHED:
                with self._within(READY_TIMEOUT_S, child, "start"):
                    line = child.stdout.readline()
        if not line:
            with contextlib.suppress(TimeoutError):  # it has only closed its output
                child.wait(STOP_TIMEOUT_S)
            raise ConfigError(f"{self.name} ended while starting (exit status {self.exit_status})")
        return line

    @contextlib.contextmanager
    def _within(self, timeout_s: float, child: Child, what: str) -> Iterator[None]:
        """Ends the child if the block takes longer, and raises ConfigError then."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            child.kill()

        watchdog = threading.Timer(timeout_s, end)
        watchdog.start()
        try:
            with contextlib.suppress(OSError):  # it died before it read all
                yield
        finally:
            watchdog.cancel()
        if is_late.is_set():
            raise ConfigError(f"{self.name} did not {what} in {timeout_s:g} s")

    def is_running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._child is not None and self._child.is_running()

    @property
    def exit_status(self) -> int | str:
        """Of a process that has ended."""
        assert self._child is not None
        status = self._child.exit_status
        return "unknown" if status is None else status

    def kill(self) -> None:
        """Ends the process at once. One that is only just being started ends its start by that."""
        with self._lock:
            self._is_wanted = False
            if self._child is not None:
                self._child.kill()

    def stop(self, hurry: threading.Event) -> None:
        """Ends the process: by closing its standard input, and if that does not help, by force."""
        child = self._child
        if child is None:
            return
        child.hang_up()
        drain_s = self.ready.drain_timeout_s if isinstance(self.ready, GatewayReady) else 0.0
        if not self._ends(child, STOP_TIMEOUT_S + drain_s, hurry):
            child.kill()
            child.wait(STOP_TIMEOUT_S)
        child.close()

    def _ends(self, child: Child, timeout_s: float, hurry: threading.Event) -> bool:
        """Waits for its end, and tells it of a hurry: again and again, as it may not listen yet."""
        clock = MonotonicClock()
        end_s = clock.now_s() + timeout_s
        is_hurried = False
        while clock.now_s() < end_s:
            with contextlib.suppress(TimeoutError):
                child.wait(LOOK_EVERY_S)
                return True
            if hurry.is_set():
                if not is_hurried:
                    is_hurried, end_s = True, clock.now_s() + HURRIED_TIMEOUT_S
                child.terminate()
        return False


class ProcessLauncher:
    """Runs every service as a process of a nursery: its own, or one that others use too."""

    def __init__(self, shared: Nursery | None = None) -> None:
        self._nursery = shared or Nursery()
        self._is_shared = shared is not None
        self._processes: list[ServiceProcess] = []
        self._starting: dict[ServiceProcess, threading.Event] = {}  # set when the start is over
        self._is_closed = False
        self._hurry = threading.Event()
        self._books = threading.Lock()  # of these three

    @property
    def processes(self) -> list[ServiceProcess]:
        """Those of now: others may start and end some meanwhile."""
        with self._books:
            return list(self._processes)

    def open(self) -> None:
        """Starts to import what services need. Raises ConfigError."""
        try:
            self._nursery.open()
        except OSError as error:
            raise ConfigError(f"no process can be started: {error}") from error

    def room(self, num_gpus: float) -> int:
        """As many as cores, but a few in any case: of GPUs a process knows nothing."""
        return max(LEAST_ROOM, len(os.sched_getaffinity(0)))

    def scarce(self, num_gpus: float) -> str:
        """Cores, or the least."""
        return f"this machine has {len(os.sched_getaffinity(0))} cores"

    def keep_places(self, names: Collection[str]) -> None:
        """Nothing is reserved."""

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """A machine does not grow."""

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker process."""
        return self._start(self._service(spec.worker_id, "worker"), spec, WorkerReady)

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway process."""
        return self._start(self._service(spec.name, "gateway"), spec, GatewayReady)

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends a process."""
        for process in self.processes:
            if process.name == name:
                self._end(process, by_force=by_force)

    def running(self) -> Mapping[str, WorkerReady | GatewayReady]:
        """Processes that have answered and not ended."""
        return {p.name: p.ready for p in self.processes if p.ready is not None and p.is_running()}

    def counters(self) -> Mapping[str, int]:
        """Nurseries that ended, or gave no answer."""
        return {"nurseries lost": self._nursery.num_lost}

    def dead(self) -> dict[str, str]:
        """Processes that ended, each named once."""
        ended = [
            process
            for process in self.processes
            if process not in self._starting and not process.is_running()
        ]
        for process in ended:
            process.stop(self._hurry)  # which closes its pipes
            self._remove(process)
        return {p.name: f"{p.name} ended with status {p.exit_status}" for p in ended}

    def close(self) -> None:
        """Stops the gateways, then the workers, those of a kind at once; starts nothing more."""
        with self._books:
            self._is_closed = True
        for kind in ("gateway", "worker"):
            of_kind = [process for process in self.processes if process.kind == kind]
            if of_kind:
                with ThreadPoolExecutor(len(of_kind)) as threads:
                    list(threads.map(lambda process: self._end(process, by_force=False), of_kind))
        if not self._is_shared:
            self._nursery.close()

    def hurry(self) -> None:
        """Has processes told that stop."""
        self._hurry.set()

    def _service(self, name: str, kind: str) -> ServiceProcess:
        return ServiceProcess(name, kind, self._nursery)

    def _end(self, process: ServiceProcess, *, by_force: bool) -> None:
        is_over = self._starting.get(process)
        if is_over is not None:  # whoever starts it hears of its end, and cleans up
            process.kill()
            is_over.wait(STOP_TIMEOUT_S)
        elif by_force:
            process.kill()
        process.stop(self._hurry)
        self._remove(process)

    def _start(
        self, process: ServiceProcess, spec: WorkerSpec | GatewaySpec, ready_type: type[T]
    ) -> T:
        is_over = threading.Event()
        with self._books:  # before it starts: an interrupt leaves it to `close`
            if self._is_closed:
                raise ConfigError(f"{process.name} is not wanted any more")
            self._starting[process] = is_over
            self._processes.append(process)
        try:
            ready = process.start(spec, ready_type)
        except Exception as error:
            if not isinstance(error, ConfigError):  # else it ends by itself
                process.kill()
            process.stop(self._hurry)
            self._remove(process)
            raise
        finally:
            with self._books:
                del self._starting[process]
            is_over.set()
        return ready

    def _remove(self, process: ServiceProcess) -> None:
        with self._books, contextlib.suppress(ValueError):  # somebody else did
            self._processes.remove(process)
