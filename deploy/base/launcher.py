"""The interface between the pool controller and the code that runs services.

Three launchers implement it: plain processes (`deploy/local/launcher.py`), a Ray of this machine
alone, and a Ray cluster (both in `deploy/ray/launcher.py`).

Several threads may call a launcher at once. Starting a service takes seconds, and other calls do
not wait for it.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from deploy.base.gpus import FoundGpus
from deploy.base.spec import ServiceReady, ServiceSpec
from deploy.logs.reading import LogPieces, LogsQuery, read_pieces
from engine.control import Pools

STOP_TIMEOUT_S = 30.0  # time for a service to stop; a gateway gets its drain time in addition
CUT_TIMEOUT_S = 10.0  # time for a service to stop after `stop_draining`
LOOK_EVERY_S = 0.2  # interval at which a running stop checks if `stop_draining` was called


class Launcher(Protocol):
    """Starts services, watches them, and stops them: gateways first, then workers, then stores."""

    def open(self) -> None:
        """Prepares to start services. Raises ConfigError."""
        ...

    def gpus(self) -> FoundGpus:
        """Returns the GPUs of this machine for workers. May be called before `open`."""
        ...

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit now if each worker takes `num_gpus`. Nodes may join and
        leave.

        Returns quickly: the controller calls this every second.
        """
        ...

    def scarce(self, num_gpus: float) -> str:
        """Describes the resource that limits `room`, for an operator."""
        ...

    def keep_places(self, names: Collection[str]) -> None:
        """Keeps the reservations of these dead workers, which will be restarted.

        Gives up the reservations of all other dead workers. Returns quickly if there are no dead
        workers. Does nothing if the launcher reserves no places.
        """
        return

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Requests nodes until a total of `num_workers` fit. `room` counts nodes that have joined.

        `wanted` is the wanted number of workers of each role; their sum may be less than
        `num_workers` for now. Each call replaces the last request; 0 workers withdraw the request.
        Does nothing on a single machine.
        """
        return

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts a service and waits until the service listens. After a ConfigError no process is
        left.

        A store starts on its node, `spec.node`.
        """
        ...

    def nodes(self) -> Sequence[str]:
        """Returns the names of the nodes. Each node may have a store. Returns without waiting."""
        return ("",)

    def stop(self, name: str, *, by_force: bool) -> None:
        """Stops a service, even while the service starts. The service's name is free on return.

        With `by_force` the service is killed at once instead of being asked to stop.
        """
        ...

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns the running services that this launcher or an earlier launcher started."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Returns for each kind of the launcher's own faults how often the launcher has recovered
        from it.
        """
        return {}

    def health(self) -> Mapping[str, bool]:
        """Returns True (alive) or False (dead) for each program that services depend on. Never
        waits.

        Empty if services depend on no other program, as with plain processes.
        """
        return {}

    def read_logs(self, folder: str, query: LogsQuery) -> LogPieces:
        """Returns the log lines that services kept.

        On a single machine all lines are in one folder.
        """
        return read_pieces(Path(folder), query)

    def dead(self) -> dict[str, str]:
        """Returns the services that ended by themselves since the last call, with the reason of
        each end.

        The names of these services are free again.
        """
        ...

    def close(self) -> None:
        """Stops all services. No process of a service is left on return."""
        ...

    def stop_draining(self) -> None:
        """Makes `close` stop waiting for answers. Any thread may call this, even before `close`."""
        ...
