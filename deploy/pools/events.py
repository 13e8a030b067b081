"""Events and effects of the pool machine.

Events are facts about workers, gateways, room and time, and orders. Effects are requests to the
controller.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.pools.orders import Order
from engine.control import GatewayReport, HistoryStep, Member, Members, Version
from engine.layout import KVFormat
from engine.messages import LoadReport, Role, WorkerId

# ---------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True)
class Found:
    """The services that ran when the controller started. Other services may now be started.

    The role of each worker comes later, with `Connected`.
    """

    workers: tuple[Member, ...]
    gateways: tuple[str, ...] = ()
    stores: tuple["FoundStore", ...] = ()


@dataclass(frozen=True, slots=True)
class FoundStore:
    """A store that ran when the controller started."""

    name: str
    address: str
    version: str
    node: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A new worker listens at `address`; `start` is the number in `StartWorker`."""

    worker_id: WorkerId
    start: int
    address: str
    context_len: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker did not start. No process of the worker is left."""

    worker_id: WorkerId
    start: int
    reason: str
    waits_for_node: bool = False  # no node had room, and more nodes may come


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """A worker that was told to stop has ended."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Died:
    """A worker or a gateway ended without an order to stop."""

    name: str
    how: str


@dataclass(frozen=True, slots=True)
class Connected:
    """A session with the worker at this address is open."""

    worker_id: WorkerId
    address: str
    role: Role
    kv_format: KVFormat
    kernels: str = ""  # as in `engine.messages.Welcome`


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session with the worker at this address is over."""

    worker_id: WorkerId
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """A worker reported its role."""

    worker_id: WorkerId
    address: str
    role: Role


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """A worker reported its load."""

    worker_id: WorkerId
    address: str
    load: LoadReport


# ---------------------------------------------------------------- gateways and stores


@dataclass(frozen=True, slots=True)
class ServiceStarted:
    """A gateway or a store listens. A store's `address` is for gateways."""

    name: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class ServiceFailed:
    """A gateway or a store did not start."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServiceStopped:
    """A gateway or a store that was told to stop has ended. No process of it is left."""

    name: str


@dataclass(frozen=True, slots=True)
class GatewayHeard:
    """A session with a gateway is open."""

    name: str


@dataclass(frozen=True, slots=True)
class GatewaySilent:
    """A running gateway has no session with the controller."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    """The latest report of a gateway; None once its session is over."""

    name: str
    report: GatewayReport | None


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The nodes that may have a store."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A gateway knows members that an earlier controller published."""

    members: Members


# ---------------------------------------------------------------- room and time


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """The number of workers that fit now, and the resource that limits it."""

    max_workers: int
    why: str


@dataclass(frozen=True, slots=True)
class PoolTick:
    """Time has passed. The shell sends it about once a second."""


@dataclass(frozen=True, slots=True)
class PartsSeen:
    """The parts that services depend on, by name: True if alive. See `Launcher.health`."""

    alive: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class StoresSeen:
    """Troubles of the tiers of each store that reports: sentences that do not name the store."""

    troubles: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class OrdersStored:
    """The latest orders are stored, or could not be stored because of `trouble`."""

    trouble: str | None


PoolEvent = (
    Found
    | WorkerStarted
    | WorkerStartFailed
    | WorkerStopped
    | Died
    | Connected
    | Disconnected
    | RoleSeen
    | LoadSeen
    | ServiceStarted
    | ServiceFailed
    | ServiceStopped
    | GatewayHeard
    | GatewaySilent
    | GatewaySeen
    | Overtaken
    | RoomSeen
    | PartsSeen
    | StoresSeen
    | OrdersStored
    | NodesSeen
    | PoolTick
    | Order
)


# ---------------------------------------------------------------- effects


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
    """Start a gateway. `ServiceStarted` or `ServiceFailed` answers it."""

    name: str


@dataclass(frozen=True, slots=True)
class StopGateway:
    """End a gateway's process by force. `ServiceStopped` answers it."""

    name: str


@dataclass(frozen=True, slots=True)
class StartStore:
    """Start a store on a node. `ServiceStarted` or `ServiceFailed` answers it."""

    name: str
    version: Version
    node: str


@dataclass(frozen=True, slots=True)
class StopStore:
    """End a store. `ServiceStopped` answers it. If its version `is_over`, its blocks go."""

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
