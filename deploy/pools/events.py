"""Events and effects of the pool machine.

Events are orders, and facts about workers, gateways, room and time. Effects are requests that the
machine makes to the controller.
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
    """The services that were running when the controller started. From now on other services may be
    started.

    The role of each worker is reported later, by `Connected`.
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
    """A new worker listens at `address`. `start` is the number of the `StartWorker` effect."""

    worker_id: WorkerId
    start: int
    address: str
    context_len: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker's start failed. No process of the worker is left."""

    worker_id: WorkerId
    start: int
    reason: str
    waits_for_node: bool = False  # True if no node had room and more nodes may join


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """A worker has ended as ordered by `StopWorker`."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Died:
    """A service ended by itself, without an order to stop."""

    name: str
    how: str


@dataclass(frozen=True, slots=True)
class Connected:
    """A session with the worker at this address is open."""

    worker_id: WorkerId
    address: str
    role: Role
    kv_format: KVFormat
    kernels: str = ""  # the field of `engine.messages.Welcome`


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session with the worker at this address has ended."""

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
    """A gateway or a store has started and listens. `address` is a store's address for gateways."""

    name: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class ServiceFailed:
    """A gateway's or a store's start failed."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServiceStopped:
    """A gateway or a store has ended as ordered. No process of the service is left."""

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
    """The latest report of a gateway. None once the gateway's session has ended."""

    name: str
    report: GatewayReport | None


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The nodes that may have a store."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A gateway has members that an earlier controller published."""

    members: Members


# ---------------------------------------------------------------- room and time


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """The number of workers that fit now, and the resource that limits this number."""

    max_workers: int
    why: str


@dataclass(frozen=True, slots=True)
class PoolTick:
    """Time has passed. The shell sends this event about once a second."""


@dataclass(frozen=True, slots=True)
class PartsSeen:
    """The programs that services depend on, by name: True if alive. See `Launcher.health`."""

    alive: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class StoresSeen:
    """Troubles of stores' tiers, by store: sentences that do not name the store."""

    troubles: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class OrdersStored:
    """The latest orders have been stored, or could not be stored because of `trouble`."""

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
    """Start a worker.

    `WorkerStarted` or `WorkerStartFailed` with the same `start` reports the outcome.
    """

    worker_id: WorkerId
    role: Role
    start: int
    version: Version


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop a worker's process. Kill the process if `by_force`. `WorkerStopped` reports the end."""

    worker_id: WorkerId
    by_force: bool


@dataclass(frozen=True, slots=True)
class SetWorkerRole:
    """Send a role to a worker."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class StartGateway:
    """Start a gateway. `ServiceStarted` or `ServiceFailed` reports the outcome."""

    name: str


@dataclass(frozen=True, slots=True)
class StopGateway:
    """Kill a gateway's process. `ServiceStopped` reports the end."""

    name: str


@dataclass(frozen=True, slots=True)
class StartStore:
    """Start a store on a node. `ServiceStarted` or `ServiceFailed` reports the outcome."""

    name: str
    version: Version
    node: str


@dataclass(frozen=True, slots=True)
class StopStore:
    """Stop a store.

    `ServiceStopped` reports the end. If the store's version `is_over`, its blocks are deleted.
    """

    name: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the present members to all gateways and stores."""

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
