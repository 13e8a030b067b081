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

STOP_TIMEOUT_S = 30.0  # for a service to stop; for a gateway, its drain time is added
CUT_TIMEOUT_S = 10.0  # for a service to stop after `stop_draining`
LOOK_EVERY_S = 0.2  # interval at which a stop checks for `stop_draining`


class Launcher(Protocol):
    """Starts services, watches them, and stops them: gateways first, then workers, then stores."""

    def open(self) -> None:
        """Prepares to start services. Raises ConfigError."""
        ...

    def gpus(self) -> FoundGpus:
        """Returns the GPUs of this machine for workers. May be called before `open`."""
        ...

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit now if each takes `num_gpus`. The number of nodes may vary.

        Quick enough to be called every second.
        """
        ...

    def scarce(self, num_gpus: float) -> str:
        """Describes the resource that limits `room`, for an operator."""
        ...

    def keep_places(self, names: Collection[str]) -> None:
        """Keeps the reservations of these dead workers, which will be started again.

        Gives up the reservations of all other dead workers. Quick if there are none. Does nothing
        if the launcher reserves no places.
        """
        return

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Asks for nodes until a total of `num_workers` fit. `room` shows the nodes that came.

        `wanted` gives the roles, and may add up to less than `num_workers` for now. Each call
        replaces the last request; 0 workers withdraw it. Does nothing on a single machine.
        """
        return

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts a service and waits until it listens. After ConfigError no process is left.

        A store starts on its node, `spec.node`.
        """
        ...

    def nodes(self) -> Sequence[str]:
        """Returns the names of the nodes, each of which may have a store. Quick."""
        return ("",)

    def stop(self, name: str, *, by_force: bool) -> None:
        """Stops a service, even while it starts. Its name is free on return.

        With `by_force` the service is killed without being asked to stop.
        """
        ...

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns the running services that this launcher, or one before it, started."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Returns how often the launcher has recovered from each fault of its own, by name."""
        return {}

    def health(self) -> Mapping[str, bool]:
        """Returns True or False (dead) for each part that services depend on. Never waits.

        Empty if there are no such parts, as for plain processes.
        """
        return {}

    def read_logs(self, folder: str, query: LogsQuery) -> LogPieces:
        """Returns the log lines that services kept. On a single machine all are in one folder."""
        return read_pieces(Path(folder), query)

    def dead(self) -> dict[str, str]:
        """Returns the services that ended by themselves since the last call, and how each ended.

        Their names are free again.
        """
        ...

    def close(self) -> None:
        """Stops all services. No process of them is left on return."""
        ...

    def stop_draining(self) -> None:
        """Makes `close` stop waiting for answers. Any thread may call this, even before `close`."""
        ...
