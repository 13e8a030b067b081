"""Bodies and answers of the operator's API."""

from typing import Annotated, Any

import msgspec

from deploy.base.spec import WorkerFacts
from deploy.pools.gateways import GatewayState
from deploy.pools.planning import DecisionOutcome
from deploy.pools.stores import StoreState
from deploy.pools.versions.orders import MAX_WEIGHT
from deploy.pools.workers.record import WorkerState
from engine.config import PlannerMode
from engine.control import (
    GatewaySummary,
    Pools,
    PrefixUse,
    RequestInfo,
    VersionSummary,
    WorkerSummary,
)
from engine.messages import Role

RESTART = "a restart"  # `Difference.order` of settings that only a restart can change
Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Weight = Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)]


class PoolCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of workers by role."""

    prefill: Count | None = None
    decode: Count | None = None
    mixed: Count | None = None


class PoolsBody(PoolCounts, frozen=True):
    """Wanted workers by role; omitted roles stay. `version` defaults to the current one."""

    version: str | None = None


class UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new version. Omitted fields get the values of the current version; an omitted name is
    chosen.

    `worker` has settings of `[worker]` by name; omitted settings get the values of the current
    version. With a weight, the version is served beside the other versions, with these pools.
    Without a weight, the version replaces all other versions, and these are its final pools.

    `canary` are the shares of new requests that the version gets first, in per cent. Each share
    lasts `hold_s` seconds. If omitted, `[update]` applies. With `allows_shorter`, the version may
    be limited to shorter sequences than other versions have served lately.
    """

    name: str | None = None
    of: str | None = None  # the name of a model in [models]; None: the main model
    model: str | None = None
    model_name: str | None = None  # the model's name in the API
    worker: dict[str, Any] | None = None
    pools: PoolCounts | None = None
    weight: Weight | None = None
    canary: list[int] | None = None
    hold_s: float | None = None
    allows_shorter: bool = False


class Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a declaration's file: the model, and settings by section. Settings that the
    file omits keep their running values.

    API keys may be given as hashes, as in `gateway.api_key`.
    """

    model: str | None = None
    settings: dict[str, dict[str, Any]] = {}


class Difference(msgspec.Struct, frozen=True):
    """A setting whose declared and running values differ, and the order that changes it."""

    key: str
    running: Any
    declared: Any
    order: str  # RESTART, or a command


class DifferencesAnswer(msgspec.Struct, frozen=True):
    """The settings whose declared and running values differ, in the order of the declaration."""

    differences: tuple[Difference, ...]


class RollbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The former version that takes over again. Default: the version that was replaced last."""

    name: str | None = None


class WeightsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of versions, by name. A version that is not named keeps its weight."""

    weights: dict[str, Weight]


class FinishBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The final pools; by default at least as many workers as the current version has."""

    pools: PoolCounts | None = None


class FlipBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new role of a worker."""

    role: Role


class PlannerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The planner's mode."""

    mode: PlannerMode


class WorkerInfo(WorkerSummary, frozen=True, kw_only=True):
    """A worker. `role` is the role that the worker reports; `target` is the wanted role."""

    state: WorkerState
    state_s: float  # time in this state
    pid: int | None
    address: str | None
    waiting_seqs: int
    running_seqs: int
    open_leases: int
    free_blocks: int  # including cached ones
    facts: WorkerFacts | None = None  # None while the worker does not run


class GatewayInfo(GatewaySummary, frozen=True, kw_only=True):
    """A gateway process. `missing` is the reason why the gateway cannot serve, or None."""

    state: GatewayState
    pid: int | None
    is_connected: bool
    missing: str | None
    members_version: int
    num_requests: int
    num_waiting: int


class StepInfo(msgspec.Struct, frozen=True):
    """A line of the history."""

    number: int
    age_s: float
    subject: str
    what: str
    why: str
    role: Role | None = None  # the worker's role, if the text does not contain it


class PlannerInfo(msgspec.Struct, frozen=True):
    """The planner's mode, and the reasons of its latest proposal; empty while planning is off."""

    mode: PlannerMode
    reasons: tuple[str, ...]


class DecisionInfo(msgspec.Struct, frozen=True):
    """A proposal of the planner that would change something, and its outcome.

    `num_workers` is the wanted total. If `after` has fewer workers, there is no room for the others
    yet.
    """

    number: int
    age_s: float
    mode: PlannerMode
    before: Pools
    after: Pools
    num_workers: int
    outcome: DecisionOutcome
    why_refused: str
    summary: str  # the decision as one line
    reasons: tuple[str, ...]
    model: str = ""  # a model in [models]; empty: the main model


class PlannerAnswer(msgspec.Struct, frozen=True):
    """The planner and its decisions, latest last."""

    planner: PlannerInfo
    wanted: Pools
    decisions: list[DecisionInfo]


class VersionInfo(VersionSummary, frozen=True, kw_only=True):
    """A version of a model. `missing` is the reason why a gateway cannot serve it, or None.

    `worker` has the version's settings of `[worker]`, by name.
    """

    model: str
    fingerprint: str
    num_requests: int
    missing: str | None
    worker: dict[str, Any]


class VersionsAnswer(msgspec.Struct, frozen=True):
    """All versions, the current version first.

    `taking_over` is the name of the version that a rollout introduces.
    """

    versions: list[VersionInfo]
    taking_over: str | None


class PoolsAnswer(msgspec.Struct, frozen=True):
    """The pools. `wanted` is for the current version.

    `settled`: all services are in their wanted state, and no change is under way. `troubles` has a
    sentence for each present fault or limit.
    """

    wanted: Pools
    versions: list[VersionInfo]
    taking_over: str | None
    settled: bool
    version: int
    max_workers: int
    workers: list[WorkerInfo]
    gateways: list[GatewayInfo]
    planner: PlannerInfo
    troubles: tuple[str, ...]
    counters: dict[str, int]
    steps: list[StepInfo]  # the latest steps of the history

    @property
    def state(self) -> str:
        """The state of all pools in a few words."""
        if not self.settled:
            return "changes are under way"
        return "not all is well" if self.troubles else "all as wanted"


class PreviewAnswer(msgspec.Struct, frozen=True):
    """The immediate effects that an order would have. Nothing was changed.

    Each effect is one line: a start, a stop, or a role that would be sent to a worker. Later moves
    follow one by one, once these effects are complete.
    """

    before: list[VersionInfo]
    after: list[VersionInfo]
    planner: PlannerMode
    effects: list[str]
    steps: list[StepInfo]


class WorkersAnswer(msgspec.Struct, frozen=True):
    """All workers."""

    workers: list[WorkerInfo]


class ListedRequest(msgspec.Struct, frozen=True):
    """A request and the gateway that serves it."""

    gateway: str
    request: RequestInfo


class RequestsAnswer(msgspec.Struct, frozen=True):
    """Requests in service, oldest first. `num_requests` counts unlisted ones too."""

    num_requests: int
    requests: list[ListedRequest]


class LogsAnswer(msgspec.Struct, frozen=True):
    """Log lines that services kept, in order of time, in the form of `logs.format = "json"`.

    `after` is the cursor for the next query. `has_more`: more lines are available now.
    """

    lines: list[dict[str, Any]]
    after: str
    has_more: bool
    overwritten: list[str]  # services that have lost lines since the last answer
    silent: list[str]  # nodes that did not answer


class StoreTier(msgspec.Struct, frozen=True):
    """A tier of a store.

    `fault` is the reason why the tier is not used; `shortage` is the reason why it is too small.
    """

    medium: str
    num_blocks: int  # blocks that can be found
    max_blocks: int
    num_bytes: int
    max_bytes: int
    offered_blocks: int  # hits: prompts' blocks that this tier was the first to have
    fault: str | None
    shortage: str | None = None


class StoreInfo(msgspec.Struct, frozen=True):
    """A store of KV. Unless `is_connected`, all fields that the store itself reports are 0 or
    empty.

    `counters` count since the start of the store's process, by "name", "name:reason" or
    "name:medium_reason".
    """

    name: str
    version: str
    node: str  # node of the store; empty on a single machine
    state: StoreState
    is_connected: bool
    pid: int | None  # process id of the store; None while no process runs
    address: str | None
    block_size: int  # tokens per block
    block_bytes: int
    tiers: list[StoreTier]
    num_peers: int  # workers and other stores whose blocks this store tracks
    num_leases: int
    num_new: int  # blocks that workers cached and that this store has not examined yet
    num_starts: int  # starts of the store's process; more than 1: the process crashed
    counters: dict[str, float]
    prefixes: list[PrefixUse]  # the prefixes that are offered most often
    why: str = ""  # the reason why the store does not run


class StoresAnswer(msgspec.Struct, frozen=True):
    """All stores, by name."""

    stores: list[StoreInfo]


class DropBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stores that drop all blocks: stores of one version (default: the current version) or of
    all versions.
    """

    version: str | None = None
    every_version: bool = False


class DropAnswer(msgspec.Struct, frozen=True):
    """The stores that were ordered to drop all blocks.

    In a preview, the stores that would get the order.
    """

    stores: list[str]


class ErrorBody(msgspec.Struct, frozen=True):
    """The kind of an error, and its reason."""

    type: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The answer to a request that failed."""

    error: ErrorBody
