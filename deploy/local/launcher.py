"""Runs workers, gateways and stores as processes of this machine.

By default every service runs in the launcher's network namespace. A `LocationOf` can choose another
namespace for a service. Chaos tests put each worker into a namespace whose network can be cut off
(`bench/chaos/netns.py`). `baton serve --launcher process --places MODULE:FUNCTION` loads a hook:
the function takes no argument and returns the `LocationOf`.
"""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol, cast

import msgspec

from deploy.base.gpus import FoundGpus, GpuBooks, find_gpus
from deploy.base.launcher import STOP_TIMEOUT_S, Launcher
from deploy.base.reasons import explain_status
from deploy.base.spec import GatewaySpec, ServiceReady, ServiceSpec, WorkerSpec
from deploy.local.nursery import SERVICES, Nursery
from deploy.local.service_process import ServiceProcess
from deploy.pools.placement import LEAST_ROOM
from engine.errors import ConfigError


class ServiceLocation(Protocol):
    """A network namespace for services.

    Hashable, because the launcher keeps one nursery per namespace.
    """

    @property
    def address(self) -> str:
        """The IP address at which services in all other namespaces reach this namespace."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Moves the calling thread, and all processes that the thread starts, to the namespace."""
        ...


# Maps the kind ("worker" or "gateway") and the name of a service to its namespace. None: the
# launcher's namespace. A restarted worker keeps its name, so it keeps its namespace.
LocationOf = Callable[[str, str], ServiceLocation | None]


class ProcessLauncher(Launcher):
    """Runs every service as a child of a nursery.

    `shared` is a nursery that other launchers use too, so `close` does not end this nursery.
    `place_of` chooses the network namespace of each service; each namespace has its own nursery.
    `look` finds GPUs. GPUs are assigned to a worker before its process starts, and freed after the
    process has ended.
    """

    def __init__(
        self,
        shared: Nursery | None = None,
        *,
        place_of: LocationOf | None = None,
        look: Callable[[], FoundGpus] = lambda: find_gpus(os.environ),
    ) -> None:
        self._nursery = shared or Nursery()
        self._is_shared = shared is not None
        self._place_of = place_of or (lambda kind, name: None)
        self._placed: dict[ServiceLocation, Nursery] = {}
        self._processes: list[ServiceProcess] = []
        self._starting: dict[ServiceProcess, threading.Event] = {}  # event: set at the start's end
        self._is_closed = False
        self._stops_draining = threading.Event()
        self._check = look
        self._gpus: GpuBooks | None = None  # None until it is first used
        self._books = threading.Lock()  # guards the attributes above

    @property
    def processes(self) -> list[ServiceProcess]:
        """Returns a copy of the list of processes, because other threads may change the list."""
        with self._books:
            return list(self._processes)

    def open(self) -> None:
        """Starts the nursery, which imports the services' modules. Raises ConfigError."""
        try:
            self._nursery.open(*SERVICES)
        except OSError as error:
            raise ConfigError(f"no process can be started: {error}") from error

    def gpus(self) -> FoundGpus:
        """Returns this machine's GPUs."""
        return self._gpu_books().found

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit on the GPUs.

        Without GPUs: on the cores, at least `LEAST_ROOM`.
        """
        if num_gpus:
            return self._gpu_books().room(num_gpus)
        return max(LEAST_ROOM, len(os.sched_getaffinity(0)))

    def scarce(self, num_gpus: float) -> str:
        """Describes the number of GPUs, or else of cores, for an operator."""
        if num_gpus:
            there = len(self._gpu_books().found.gpus)
            return f"this machine has {there} GPU, of which a worker takes {num_gpus:g}"
        return f"this machine has {len(os.sched_getaffinity(0))} cores"

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts a process."""
        place = self._place_of(spec.kind, spec.name)
        if place is not None:
            spec = msgspec.structs.replace(spec, host=place.address)
            if isinstance(spec, GatewaySpec):  # the sockets of `ports` are in another namespace
                gateway = msgspec.structs.replace(spec.gateway, host=place.address)
                spec = msgspec.structs.replace(spec, gateway=gateway, ports=None)
        if isinstance(spec, WorkerSpec):
            gpus: tuple[str, ...] = ()  # a worker on the CPU sees no GPU
            if spec.num_gpus:
                books = self._gpu_books()
                with self._books:
                    gpus = books.assign(spec.worker_id, spec.num_gpus)
            spec = msgspec.structs.replace(spec, gpus=gpus)
        return self._start(ServiceProcess(spec, self._nursery_of(place)))

    def stop(self, name: str, *, by_force: bool) -> None:
        """Stops a process."""
        for process in self.processes:
            if process.name == name:
                self._end(process, by_force=by_force)

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns the answers of the processes that have started and not ended."""
        return {p.name: p.ready for p in self.processes if p.ready is not None and p.is_running()}

    def counters(self) -> Mapping[str, int]:
        """Returns the number of nurseries that ended by themselves or did not answer."""
        return {"nurseries lost": sum(nursery.num_lost for nursery in self._nurseries())}

    def dead(self) -> dict[str, str]:
        """Returns the processes that ended by themselves since the last call."""
        ended = [
            process
            for process in self.processes
            if process not in self._starting and not process.is_running()
        ]
        for process in ended:
            process.stop(self._stops_draining)  # closes the pipes of the dead process
            self._remove(process)
        how = {p.name: explain_status(p.exit_status).removeprefix("exit ") for p in ended}
        return {name: f"{name} ended with {status}" for name, status in how.items()}

    def close(self) -> None:
        """Stops all gateways at the same time, then all workers, then all stores.

        Later starts fail.
        """
        with self._books:
            self._is_closed = True
        try:
            for kind in ("gateway", "worker", "store"):
                of_kind = [process for process in self.processes if process.kind == kind]
                if of_kind:
                    with ThreadPoolExecutor(len(of_kind)) as threads:
                        list(threads.map(lambda p: self._end(p, by_force=False), of_kind))
        finally:
            for nursery in self._nurseries():
                if not (self._is_shared and nursery is self._nursery):
                    nursery.close()

    def stop_draining(self) -> None:
        """Makes gateways that stop cut off their running answers."""
        self._stops_draining.set()

    def _gpu_books(self) -> GpuBooks:
        if self._gpus is None:
            found = self._check()
            with self._books:
                self._gpus = self._gpus or GpuBooks(found)
        return self._gpus

    def _nursery_of(self, place: ServiceLocation | None) -> Nursery:
        if place is None:
            return self._nursery
        with self._books:
            if place not in self._placed:
                self._placed[place] = Nursery(entered=place.entered)
            return self._placed[place]

    def _nurseries(self) -> list[Nursery]:
        with self._books:
            return [self._nursery, *self._placed.values()]

    def _start(self, process: ServiceProcess) -> ServiceReady:
        is_over = threading.Event()
        with self._books:  # listed before the start: `close` finds it after an interrupt
            if self._is_closed:
                self._give_back(process)
                raise ConfigError(f"{process.name} is not started: the launcher is closed")
            self._starting[process] = is_over
            self._processes.append(process)
        try:
            ready = process.start()
        except Exception as error:
            if not isinstance(error, ConfigError):  # after a ConfigError the process ends by itself
                process.kill()
            process.stop(self._stops_draining)
            self._remove(process)
            raise
        finally:
            with self._books:
                del self._starting[process]
            is_over.set()
        return ready

    def _end(self, process: ServiceProcess, *, by_force: bool) -> None:
        is_over = self._starting.get(process)
        if is_over is not None:  # the thread that starts the process notices its end and cleans up
            process.kill()
            is_over.wait(STOP_TIMEOUT_S)
        elif by_force:
            process.kill()
        process.stop(self._stops_draining)
        self._remove(process)

    def _remove(self, process: ServiceProcess) -> None:
        with self._books, contextlib.suppress(ValueError):  # another thread has removed the process
            self._processes.remove(process)
            self._give_back(process)

    def _give_back(self, process: ServiceProcess) -> None:
        """Frees the GPUs of an ended worker. The caller must have locked `_books`."""
        if process.kind == "worker" and self._gpus is not None:
            self._gpus.free(process.name)


def load_locations(name: str) -> LocationOf:
    """Imports and calls the function MODULE:FUNCTION.

    Raises ConfigError if there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--places {name}: {error}") from error
    return cast("LocationOf", make())
