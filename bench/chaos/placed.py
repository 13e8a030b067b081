"""`baton`, but `serve` with plain processes runs each worker in a place of its own (`netns.place`),
which has the worker's name. `bench chaos` starts it in a hub, as `python -m bench.chaos.placed`.

Gateways, which share a port, and the controller are in the hub. A worker that is started again
comes to where the one before it was. It all ends when whoever started it does, whose process id is
in the environment as `STARTED_BY`: a bench that is killed leaves neither processes nor namespaces,
but where it has just stopped this process (`stop-controller`): then they go when it is continued.
"""

import ctypes
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import msgspec

from bench.chaos.deployment import STARTED_BY
from bench.chaos.netns import Place, inside, place
from deploy.commands import main as cli
from deploy.commands import serve as serve_cli
from deploy.local.launcher import ProcessLauncher, ServiceProcess
from deploy.local.nursery import Child, Nursery
from deploy.processes import GatewayReady, GatewaySpec, WorkerReady, WorkerSpec

PR_SET_PDEATHSIG = 1


class PlacedNursery(Nursery):
    """Whoever is forked is where the nursery was started."""

    def __init__(self, there: Place) -> None:
        super().__init__()
        self._place = there

    def fork(self, kind: str) -> Child:
        """Asks for a child in that place. Raises OSError."""
        with inside(self._place.fd):
            return super().fork(kind)


class PlacedProcesses(ProcessLauncher):
    """Runs each worker in the place that `place_of` its name is, and tells it its address; gateways
    in one that they share, or where the launcher is.
    """

    def __init__(self, place_of: Callable[[str], Place], *, gateways: Place | None = None) -> None:
        super().__init__()
        self._place_of = place_of
        self._gateways = gateways
        self._nurseries: dict[Place, Nursery] = {}
        self._lock = threading.Lock()

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker process where it belongs."""
        host = self._place_of(spec.worker_id).address
        return super().start_worker(msgspec.structs.replace(spec, host=host))

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway process where it belongs."""
        if self._gateways is not None:
            host = self._gateways.address
            gateway = msgspec.structs.replace(spec.gateway, host=host)
            spec = msgspec.structs.replace(spec, gateway=gateway, control_host=host)
        return super().start_gateway(spec)

    def close(self) -> None:
        """Stops all services, then the nurseries."""
        with ExitStack() as stack:
            for nursery in self._nurseries.values():
                stack.callback(nursery.close)
            stack.callback(super().close)

    def counters(self) -> Mapping[str, int]:
        """Of the nurseries of all places."""
        found = Counter(super().counters())
        for nursery in self._nurseries.values():
            found["nurseries lost"] += nursery.num_lost
        return found

    def _service(self, name: str, kind: str) -> ServiceProcess:
        there = self._gateways if kind == "gateway" else self._place_of(name)
        if there is None:
            return super()._service(name, kind)
        with self._lock:
            nursery = self._nurseries.get(there)
            if nursery is None:
                nursery = self._nurseries[there] = PlacedNursery(there)
        return ServiceProcess(name, kind, nursery)


class OwnPlaces:
    """A place for each name, made when it is first asked for. From any thread."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> Place:
        """Raises CommandFailed."""
        with self._lock:
            if name not in self._places:
                self._places[name] = place(name, len(self._places) + 1)
            return self._places[name]


def main() -> None:
    """Runs the command."""
    _end_with(int(os.environ[STARTED_BY]))
    serve_cli.LAUNCHERS[serve_cli.LauncherKind.PROCESS] = lambda: PlacedProcesses(OwnPlaces().of)
    cli.main()


def _end_with(parent: int) -> None:
    """From now on this process is told to end when its parent has ended, however that came."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)


if __name__ == "__main__":
    main()
