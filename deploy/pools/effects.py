"""Effects of the pool machine: requests to its shell."""

from dataclasses import dataclass

from engine.control import HistoryStep, Members, Version
from engine.messages import Role, WorkerId


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker. `WorkerStarted` or `WorkerStartFailed` with the same `start` answers it."""

    worker_id: WorkerId
    role: Role
    start: int
    version: Version


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker's process; kill it if `by_force`. `WorkerStopped` answers this effect."""

    worker_id: WorkerId
    by_force: bool


@dataclass(frozen=True, slots=True)
class SetWorkerRole:
    """Send a worker its role."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class StartGateway:
    """Start a gateway. `GatewayStarted` or `GatewayFailed` answers it."""

    name: str


@dataclass(frozen=True, slots=True)
class StopGateway:
    """End a gateway's process by force. `GatewayStopped` answers it."""

    name: str


@dataclass(frozen=True, slots=True)
class StartStore:
    """Start a store on a node. `StoreStarted` or `StoreFailed` answers it."""

    name: str
    version: Version
    node: str


@dataclass(frozen=True, slots=True)
class StopStore:
    """End a store. `StoreStopped` answers it. If its version `is_over`, its blocks are deleted."""

    name: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the list of workers to all gateways."""

    members: Members


PoolEffect = (
    StartWorker
    | StopWorker
    | SetWorkerRole
    | StartGateway
    | StopGateway
    | StartStore
    | StopStore
    | Publish
    | HistoryStep
)
