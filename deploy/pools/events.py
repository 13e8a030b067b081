"""What goes into the machine of the pools and comes out of it, and what it knows of a worker."""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.config import PlannerMode
from engine.control import (
    FIRST_VERSION,
    GatewayReport,
    Member,
    Members,
    Pools,
    Version,
)
from engine.errors import BatonError
from engine.layout import KVFormat
from engine.messages import LoadReport, Role, WorkerId


class OrderRefused(BatonError):
    """An order that cannot be carried out; nothing has changed. `status` is the HTTP status."""

    def __init__(self, reason: str, *, status: int = 409) -> None:
        super().__init__(reason)
        self.status = status


# ---------------------------------------------------------------- events: what was seen


@dataclass(frozen=True, slots=True)
class Found:
    """All that runs already, told at once: what is not in it may be started.

    Roles of workers come with `Connected`.
    """

    workers: tuple[Member, ...]
    gateways: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that was to be started listens; `start` is the effect's."""

    worker_id: WorkerId
    start: int
    address: str
    context_len: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker did not start, and nothing of it is left."""

    worker_id: WorkerId
    start: int
    reason: str
    waits_for_node: bool = False  # one that may come


@dataclass(frozen=True, slots=True)
class Stopped:
    """A worker that was to be stopped is gone."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Died:
    """A worker or a gateway ended by itself."""

    name: str
    how: str


@dataclass(frozen=True, slots=True)
class Connected:
    """A session with the worker at this address is open."""

    worker_id: WorkerId
    address: str
    role: Role
    kv_format: KVFormat


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A gateway that was heard late knows an earlier controller's members."""

    members: Members


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session with the worker at this address is over."""

    worker_id: WorkerId
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """A worker says what it is there for now."""

    worker_id: WorkerId
    address: str
    role: Role


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """A worker says what it holds."""

    worker_id: WorkerId
    address: str
    load: LoadReport


@dataclass(frozen=True, slots=True)
class GatewayStarted:
    """A gateway answers, or was found to."""

    name: str


@dataclass(frozen=True, slots=True)
class GatewayFailed:
    """A gateway did not start."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """So many workers there can be now, and what limits it."""

    max_workers: int
    why: str


@dataclass(frozen=True, slots=True)
class GatewayHeard:
    """A session with the gateway is open."""

    name: str


@dataclass(frozen=True, slots=True)
class GatewayUnheard:
    """There is no session with a gateway that was started or found."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayStopped:
    """A gateway that was to be stopped is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    """What a gateway said last; None: it says nothing any more."""

    name: str
    report: GatewayReport | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. To be told about once a second."""


# ---------------------------------------------------------------- events: orders


@dataclass(frozen=True, slots=True)
class SetPools:
    """So many workers of each role, of the current version unless another one is named."""

    pools: Pools
    version: str | None = None
    why: str = "ordered"


@dataclass(frozen=True, slots=True)
class Flip:
    """This worker for another role, in place. One that is drained serves again."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    """This worker for nothing: it stays, without work, until it is flipped or stopped."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Stop:
    """This worker away, drained before."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class SetPlanner:
    """What becomes of the planner's proposals."""

    mode: PlannerMode


@dataclass(frozen=True, slots=True)
class AddVersion:
    """This version beside those that there are; `takes_over`: and then in their place."""

    version: Version
    takes_over: bool


@dataclass(frozen=True, slots=True)
class SetWeights:
    """How requests are shared among versions; who is not named keeps its weight."""

    weights: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finish:
    """This version in place of all others. `pools`: what it is to have, if not what is sensible."""

    name: str
    pools: Pools | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """This version away, and everything back to the current one."""

    name: str


Order = SetPools | Flip | Drain | Stop | SetPlanner | AddVersion | SetWeights | Finish | Abort
PoolEvent = (
    Found
    | Started
    | StartFailed
    | Stopped
    | Died
    | Connected
    | Disconnected
    | RoleSeen
    | LoadSeen
    | GatewayStarted
    | GatewayFailed
    | GatewayHeard
    | GatewayUnheard
    | GatewayStopped
    | Overtaken
    | RoomSeen
    | GatewaySeen
    | Tick
    | Order
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker; answered by `Started` or `StartFailed` with the same number."""

    worker_id: WorkerId
    role: Role
    start: int
    version: Version


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker's process; answered by `Stopped`. By force where it cannot be asked."""

    worker_id: WorkerId
    by_force: bool


@dataclass(frozen=True, slots=True)
class SetWorkerRole:
    """Tell a worker what it is there for."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class StartGateway:
    """Start a gateway; answered by `GatewayStarted` or `GatewayFailed`."""

    name: str


@dataclass(frozen=True, slots=True)
class StopGateway:
    """End a gateway's process by force; answered by `GatewayStopped`."""

    name: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell all gateways."""

    members: Members


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the history."""

    number: int
    at_s: float
    subject: str  # worker, gateway, or "pools"
    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.subject} {self.what}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Tell:
    """Something happened that an operator may want to know."""

    step: Step


PoolEffect = StartWorker | StopWorker | SetWorkerRole | StartGateway | StopGateway | Publish | Tell


# ---------------------------------------------------------------- records


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    WAITING = "waiting"  # not there; to be started when that is due
    STARTING = "starting"
    JOINING = "joining"  # runs; no session with it yet
    SERVING = "serving"
    FLIPPING = "flipping"  # was told its new role and has not confirmed it
    DRAINING = "draining"  # was told to be there for nothing, and holds something yet
    DRAINED = "drained"  # stays so until the operator wants something else
    STOPPING = "stopping"


@dataclass(slots=True)
class Worker:
    """One worker as the controller knows it."""

    worker_id: WorkerId
    target: Role | None  # what it is to be; DRAINED if it is to go; None: it was found, unasked yet
    since_s: float  # in this state
    state: WorkerState = WorkerState.WAITING
    version: str = FIRST_VERSION
    context_len: int = 0  # tokens; 0 until it runs
    start: int = 0  # the number of its latest start
    address: str | None = None  # None while it does not run
    role: Role | None = None  # as it said last
    kv_format: KVFormat | None = None
    load: LoadReport | None = None
    is_connected: bool = False
    lost_s: float | None = None  # without a session since then
    leaves: bool = False  # to be stopped when it is drained
    refuses: set[Role] = field(default_factory=set)  # roles that it did not take
    has_run: bool = False  # so its model was fetched
    moves_since_s: float | None = None  # it may decode yet what its role since then is not for

    @property
    def num_seqs(self) -> int:
        """Sequences that it holds, as it said last."""
        return 0 if self.load is None else self.load.waiting_seqs + self.load.running_seqs

    @property
    def num_leaving_seqs(self) -> int:
        """Sequences that decode here although its role is not for that: they are moved away."""
        decodes = self.role is None or self.role.decodes
        return 0 if self.load is None or decodes else self.load.decode_seqs

    @property
    def is_idle(self) -> bool:
        """Whether nobody would miss it: no sequence, no lease, no pull."""
        load = self.load
        return load is not None and not (
            load.waiting_seqs or load.running_seqs or load.open_leases or load.in_flight_blocks
        )

    @property
    def work_tokens(self) -> int:
        """What it has to do: prompts, and contexts that are decoded."""
        return 0 if self.load is None else self.load.prompt_tokens + self.load.context_tokens

    def prefills(self) -> bool:
        """Whether prompts are computed here, now and when it is what it is to be."""
        return self._serves() and _both(self.role, self.target, "prefills")

    def decodes(self) -> bool:
        """Whether tokens are generated here, now and when it is what it is to be."""
        return self._serves() and _both(self.role, self.target, "decodes")

    def _serves(self) -> bool:
        return self.is_connected and self.state in (WorkerState.SERVING, WorkerState.FLIPPING)


def _both(role: Role | None, target: Role | None, what: str) -> bool:
    return all(each is not None and getattr(each, what) for each in (role, target))


class GatewayState(StrEnum):
    """Where a gateway is in its life."""

    WAITING = "waiting"  # to be started when that is due
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"  # by force: nobody can reach it
