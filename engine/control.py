"""The messages between the controller of the pools and the gateways.

The controller dials each gateway. The first frames are `ControllerHello` and `GatewayWelcome`.
Frames are lists of messages, as in `engine.messages`. A gateway keeps the last `Members` that it
received, also while no controller runs. `Members` include the operator's intent. So a new
controller learns the intent from any gateway, and continues with a higher list number.

A *version* is a model and how workers serve it. Usually a model has one version. During an update
or a comparison it has several, each with its own workers. All versions that replace each other form
a *line*: one line for each model that the deployment serves.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from engine.config import (
    DeviceKind,
    PlannerConfig,
    PlannerMode,
    PoolsConfig,
    UpdateConfig,
    WorkerConfig,
)
from engine.demand import Observation
from engine.errors import ConfigError, ProtocolError
from engine.messages import MAX_FRAME_BYTES, GatewayId, RequestId, Role, WorkerId

CONTROL_VERSION = 8
MAX_LISTED = 1000  # requests in one `RequestList`
FIRST_VERSION = "v1"  # the name of the version that a deployment starts with
FULL_WEIGHT = 100
MAIN_LINE = ""  # the line of the model that the deployment was started with


class Pools(msgspec.Struct, frozen=True):
    """The number of workers of each role."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0

    @property
    def total(self) -> int:
        """The number of workers of all roles."""
        return self.prefill + self.decode + self.mixed

    def of(self, role: Role) -> int:
        """Returns the number of workers of a role; 0 for a role that has no pool."""
        return int(getattr(self, role)) if role in SERVING_ROLES else 0

    def moved(self, old: Role, new: Role) -> "Pools":
        """Returns the pools after one worker has changed its role."""
        return Pools(*(self.of(role) - (role is old) + (role is new) for role in SERVING_ROLES))

    def check(self) -> "Pools":
        """Returns the pools unchanged. Raises ConfigError if these pools cannot serve."""
        if min(self.prefill, self.decode, self.mixed) < 0:
            raise ConfigError("a pool cannot have fewer than 0 workers")
        if not (self.mixed or (self.prefill and self.decode)):
            raise ConfigError("need a prefill and a decode worker, or a mixed one")
        return self


SERVING_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
NO_WORKERS = Pools(0, 0, 0)
_ROLES = (*SERVING_ROLES, Role.DRAINED, Role.STORE, None)
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})", re.DOTALL)


def by_number(name: str) -> tuple[str, int, str]:
    """Sort key of names, by the number at the end of the name: `worker-2` before `worker-10`."""
    found = _NUMBERED.fullmatch(name)
    return (name, -1, name) if found is None else (found[1], int(found[2]), name)


def by_role(role: Role | None, name: str) -> tuple[int, tuple[str, int, str]]:
    """Sort key of workers in lists for people: by role, then by number."""
    return _ROLES.index(role), by_number(name)


def with_role(name: str, role: Role | None) -> str:
    """Returns a worker's name together with its role, because names do not contain the role."""
    return name if role is None else f"{name} ({role})"


class Asleep(msgspec.Struct, frozen=True):
    """The facts that are needed to wake a sleeping version: its pools, and the length of its
    context.
    """

    pools: Pools
    context_len: int


class Version(msgspec.Struct, frozen=True):
    """A model, the way in which workers serve it, and its share of the load.

    Within a line, requests are divided in proportion to the weights. A leaving version gets no new
    requests. After its last request its pools become empty; the version is removed with its last
    worker. A version that is asleep has no workers until the next request for it.
    """

    name: str = FIRST_VERSION
    model: str = ""  # source of the model: see `model_source`
    model_name: str = ""  # the model's name in the API
    worker: WorkerConfig = WorkerConfig()
    pools: Pools = Pools()
    weight: int = FULL_WEIGHT
    is_leaving: bool = False
    line: str = MAIN_LINE
    asleep: Asleep | None = None
    device: DeviceKind = DeviceKind.CPU  # the device of its workers; never `auto`

    @property
    def is_over(self) -> bool:
        """True if the version is leaving and its workers are no longer needed."""
        return self.is_leaving and not self.has_workers

    @property
    def has_workers(self) -> bool:
        """True if the version should have workers."""
        return self.pools.total > 0

    def serves_like(self, other: "Version") -> bool:
        """True if both versions give the same answers: they differ only in size, weight and
        `leaving`.
        """
        ours, theirs = (msgspec.structs.replace(each, **_AMOUNTS) for each in (self, other))
        return ours == theirs


_AMOUNTS = {"pools": Pools(), "weight": 0, "is_leaving": False, "asleep": None}


def first_name(line: str) -> str:
    """Returns the name of the first version of a line."""
    return f"{line}-{FIRST_VERSION}" if line else FIRST_VERSION


class Rollout(msgspec.Struct, frozen=True):
    """A version replaces all others of its line except those in `stay`, worker by worker."""

    to: str
    pools: Pools  # the final pools of version `to`
    before: tuple[Version, ...]  # the line's versions at the start; an abort restores them
    stay: tuple[str, ...] = ()  # other versions that are not replaced
    canary: tuple[int, ...] = ()  # first shares of the new requests for version `to`, in per cent
    hold_s: float = 0.0  # least number of seconds for which each share lasts
    # Allows a context that is shorter than the longest sequences of other versions.
    allows_shorter: bool = False


class LiveSettings(msgspec.Struct, frozen=True):
    """Sections of the configuration as an operator has changed them while the deployment runs.

    Only the controller uses them. Settings that need a restart keep their values from the start.
    """

    pools: PoolsConfig
    update: UpdateConfig
    planner: PlannerConfig


class Intent(msgspec.Struct, frozen=True):
    """The operator's intent. Versions of one line are neighbours; the first of them is the current
    version.

    The first line is the main line. It serves requests that name no model.
    """

    versions: tuple[Version, ...] = (Version(),)
    planner: PlannerMode = PlannerMode.OFF
    drained: tuple[WorkerId, ...] = ()  # drained workers: they keep running, but get no requests
    rollout: Rollout | None = None
    former: tuple[Version, ...] = ()  # replaced versions, the last one at the end
    live: LiveSettings | None = None  # None: the settings from the start apply

    @property
    def current(self) -> Version:
        """The main line's current version, which is served by default."""
        return self.versions[0]

    @property
    def most_workers(self) -> int:
        """The number of workers that all versions want when no version sleeps."""
        asleep = (v.asleep.pools.total for v in self.versions if v.asleep is not None)
        return self.num_wanted + sum(asleep)

    @property
    def num_wanted(self) -> int:
        """The number of workers that all versions want now."""
        return sum(version.pools.total for version in self.versions)

    @property
    def all_pools(self) -> Pools:
        """The workers that all versions want now, by role."""
        return Pools(*(sum(v.pools.of(role) for v in self.versions) for role in SERVING_ROLES))

    def of_line(self, line: str) -> tuple[Version, ...]:
        """Returns the versions of a line, the current one first."""
        return tuple(version for version in self.versions if version.line == line)

    def is_current(self, version: Version) -> bool:
        """True if this version is the current version of its line."""
        return self.of_line(version.line)[0] is version

    @property
    def pools(self) -> Pools:
        """The pools of the current version."""
        return self.current.pools

    def version(self, name: str) -> Version | None:
        """Returns the version of that name, or None."""
        return next((each for each in self.versions if each.name == name), None)

    def changed(self, name: str, **fields: object) -> "Intent":
        """Returns the intent after fields of one version were changed."""
        versions = tuple(
            msgspec.structs.replace(each, **fields) if each.name == name else each
            for each in self.versions
        )
        return msgspec.structs.replace(self, versions=versions)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker that gateways may use, for requests of one version."""

    worker_id: WorkerId
    address: str
    version: str = FIRST_VERSION
    context_len: int = 0  # most tokens of one sequence


# ---------------------------------------------------------------- controller to gateway


class ControllerHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a controller."""

    version: int


class Members(msgspec.Struct, frozen=True, tag=True):
    """All workers and the intent. A gateway that has a list with a higher number ignores this
    one.
    """

    version: int  # version number of this list, not of a model
    workers: tuple[Member, ...]
    intent: Intent
    stores: tuple[Member, ...] = ()  # KV stores; to gateways they are workers that compute nothing

    def of(self, name: str) -> tuple[Member, ...]:
        """Returns the workers of this version."""
        return tuple(member for member in self.workers if member.version == name)

    def stores_of(self, name: str) -> tuple[Member, ...]:
        """Returns the stores of this version."""
        return tuple(member for member in self.stores if member.version == name)


class ControllerReport(msgspec.Struct, frozen=True, tag=True):
    """Data that only the controller has, which gateways show. Sent once a second.

    `metrics` are families of samples, as `router.gateway.metrics.families` encodes them. `gateways`
    are the URLs of all gateways.
    """

    metrics: bytes
    gateways: tuple[str, ...] = ()


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Asks a gateway for its requests in service. It lists at most `limit` of them, oldest
    first.
    """

    question: int
    limit: int = MAX_LISTED


class WorkerSummary(msgspec.Struct, frozen=True):
    """A worker as the controller sees it, even before gateways can reach the worker."""

    worker_id: WorkerId
    version: str
    role: Role | None
    target: Role | None  # the role that the worker should have
    state: str
    is_connected: bool
    is_leaving: bool
    failures: int  # consecutive exits and failed starts
    is_crash_looping: bool
    num_blocks: int  # 0 while the worker does not run
    leaving_seqs: int  # sequences that must still move away: the new role does not decode
    kernels: str = ""  # the kernels in use; workers with other kernels may produce other tokens
    why: str = ""  # why the worker exited or failed to start; empty while it runs


class WorkerReport(WorkerSummary, frozen=True, kw_only=True):
    """The summary of a worker, and the Unix time at which it was made."""

    since_s: float


class VersionSummary(msgspec.Struct, frozen=True):
    """A version: its wanted workers, its serving workers, and its share of requests."""

    name: str
    model_name: str
    wanted: Pools
    serving: Pools
    weight: int
    is_current: bool  # true for the current version of its line
    is_leaving: bool
    is_asleep: bool = False
    line: str = MAIN_LINE


class EndedCounts(msgspec.Struct, frozen=True):
    """Numbers of requests that ended, of those that failed, and of those that were answered
    late.
    """

    ended: int = 0
    failed: int = 0
    late: int = 0

    def since(self, before: "EndedCounts") -> "EndedCounts":
        """Returns the increase since an earlier count, or the whole count if the gateway was
        restarted.
        """
        if self.ended < before.ended or self.failed < before.failed or self.late < before.late:
            return self
        return EndedCounts(
            self.ended - before.ended, self.failed - before.failed, self.late - before.late
        )


class CanaryVerdict(StrEnum):
    """The controller's verdict on a version that takes over. An update to a bad version is aborted
    at once.
    """

    NOT_PROBED = "not probed yet"
    TOO_FEW = "too few requests to judge"
    GOOD = "good so far"


class CanaryReport(msgspec.Struct, frozen=True):
    """The quality of service of a version that takes over, in the present step of its rollout.

    Counts cover requests that ended since `since_s` (Unix time; 0 before the first step). The
    version gets each of `shares`, in per cent of the new requests, for at least `hold_s`.
    """

    name: str
    verdict: str
    weight: int
    since_s: float
    hold_s: float
    shares: tuple[int, ...]
    min_requests: int
    own: EndedCounts
    others: EndedCounts


class GatewaySummary(msgspec.Struct, frozen=True):
    """A gateway process."""

    name: str
    url: str
    state: str


class HistoryStep(msgspec.Struct, frozen=True):
    """One line of the history of the pools. Gateways receive it together with its Unix time."""

    number: int
    at_s: float
    subject: str  # name of a worker or a gateway, or "pools"
    what: str
    why: str = ""
    role: Role | None = None  # the worker's role; None if the text names it

    def __str__(self) -> str:
        return f"{with_role(self.subject, self.role)} {self.what}" + (
            f": {self.why}" if self.why else ""
        )


class DecisionReport(msgspec.Struct, frozen=True):
    """A decision of the planner, with the Unix time of the decision."""

    number: int
    at_s: float
    mode: str
    outcome: str
    summary: str
    reasons: tuple[str, ...]


class ClusterReport(msgspec.Struct, frozen=True, tag=True):
    """Facts of the controller that are not in `ControllerReport`, for the dashboards of gateways.

    Sent when they have changed, at most once a second. `admin_url` accepts operators' orders; it
    may be reachable from the controller's machine only. Each of `troubles` is a sentence that names
    a broken or limited part, such as a dead part of Ray.
    """

    admin_url: str
    settled: bool
    troubles: tuple[str, ...]
    max_workers: int
    planner: str
    planner_reasons: tuple[str, ...]
    taking_over: str | None
    versions: list[VersionSummary]
    workers: list[WorkerReport]
    gateways: list[GatewaySummary]
    counters: dict[str, int]
    steps: list[HistoryStep]  # the most recent steps, oldest first
    decisions: list[DecisionReport]  # the most recent decisions, oldest first
    canary: CanaryReport | None = None  # set during an update that may still be aborted


class DropBlocks(msgspec.Struct, frozen=True, tag=True):
    """Orders a store to drop all blocks, in memory and in lower tiers. Sent to stores only."""


class RetireStore(msgspec.Struct, frozen=True, tag=True):
    """The version is no longer needed, so the store must delete its files and objects when it
    stops. Sent to stores only.
    """


# ---------------------------------------------------------------- gateway to controller


class GatewayWelcome(msgspec.Struct, frozen=True, tag=True):
    """A gateway's answer to `ControllerHello`, with the last members that the gateway received."""

    version: int
    gateway_id: GatewayId
    members: Members | None


class ControllerRefused(msgspec.Struct, frozen=True, tag=True):
    """A gateway's answer to a `ControllerHello` that it does not accept."""

    reason: str


class VersionReport(msgspec.Struct, frozen=True):
    """A gateway's state of a version. `missing` is the reason why the version cannot serve, or
    None.

    The counts of ended requests cover the lifetime of the gateway's process. `longest_len` is the
    length of the longest sequence that runs, or ended in the last minutes. `probe` is None until
    the version that takes over has been probed. Then it is the fault that was found, or an empty
    text.
    """

    missing: str | None
    num_requests: int  # requests that were accepted and have not ended
    fingerprint: str
    num_ended: int = 0
    num_failed: int = 0  # ended requests whose outcome was a failure
    # Ended requests that missed the service level objective (SLO), were refused, or hung.
    num_late: int = 0
    longest_len: int = 0  # tokens of the longest sequence, prompt and answer
    probe: str | None = None
    num_hung: int = 0  # running answers whose last token is much older than the objective allows


class GatewayReport(msgspec.Struct, frozen=True, tag=True):
    """A gateway's state, sent once a second. `missing` is why the gateway cannot serve, or None.

    `seen` is the planner's input by line. It is empty while the planner is off, and in the first
    second after the planner was switched on.
    """

    missing: str | None
    members_version: int
    num_workers: int  # workers with an open session
    num_requests: int  # requests that were accepted and have not ended
    num_waiting: int  # requests that wait for a worker
    queued_s: float  # predicted time in which one prefill worker computes the waiting prompts
    seen: dict[str, Observation] = {}
    versions: dict[str, VersionReport] = {}  # reports by the version's name


class RequestState(StrEnum):
    """The stage of a request in its life."""

    WAITING = "waiting"  # the request waits for a worker
    PREFILLING = "prefilling"
    PULLING = "pulling"  # the request's KV is being pulled
    DECODING = "decoding"


class RequestInfo(msgspec.Struct, frozen=True):
    """A request in service. Lengths are in tokens."""

    request_id: RequestId
    state: RequestState
    age_s: float
    prompt_len: int
    answer_len: int
    prefill: WorkerId | None
    decode: WorkerId | None
    num_attempts: int
    version: str


class RequestList(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ListRequests`. `num_requests` also counts the requests that are not listed."""

    question: int
    num_requests: int
    requests: list[RequestInfo]


# ---------------------------------------------------------------- store to controller


class StoreWelcome(msgspec.Struct, frozen=True, tag=True):
    """A store's answer to `ControllerHello`, with the number of the last list of members that it
    received.
    """

    version: int
    name: WorkerId
    members_version: int


class TierReport(msgspec.Struct, frozen=True):
    """The state of a tier of a store. A `fault` says why the tier is not used.

    A `shortage`, such as a full disk, says why the tier has room for only `max_blocks` blocks,
    fewer than configured.
    """

    medium: str
    num_blocks: int
    max_blocks: int
    fault: str | None = None
    shortage: str | None = None


class PrefixUse(msgspec.Struct, frozen=True):
    """A prefix, named by the hash of its first block in hex, and the number of times it was
    offered.
    """

    root: str
    num_offers: int


class StoreReport(msgspec.Struct, frozen=True, tag=True):
    """A store's state, sent once a second. The store learns the size of blocks from its first
    worker.

    `prefixes` are the prefixes offered most often.
    """

    block_bytes: int  # 0: no worker has reported its layout yet
    tiers: list[TierReport]
    num_peers: int  # workers whose blocks the store copies, and other stores
    num_leases: int
    num_new: int  # new blocks of workers that the store has not examined yet
    num_starts: int  # starts of the store's process; above 1: it ended unexpectedly
    counters: dict[str, float]
    prefixes: list[PrefixUse]
    is_retired: bool = False  # true after the store has received `RetireStore`


ToGateway = (
    ControllerHello
    | Members
    | ControllerReport
    | ClusterReport
    | ListRequests
    | DropBlocks
    | RetireStore
)
ToController = (
    GatewayWelcome | ControllerRefused | GatewayReport | RequestList | StoreWelcome | StoreReport
)

_BAD_FRAME = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_to_gateway = msgspec.msgpack.Decoder(list[ToGateway])
_to_controller = msgspec.msgpack.Decoder(list[ToController])


def encode_control(messages: Sequence[ToGateway] | Sequence[ToController]) -> bytes:
    """Encodes one frame, to a controller or from it."""
    frame = _encoder.encode(messages)
    assert len(frame) <= MAX_FRAME_BYTES
    return frame


def decode_from_controller(frame: bytes) -> list[ToGateway]:
    """Returns the messages of a controller's frame. Raises ProtocolError."""
    try:
        return _to_gateway.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a controller: {error}") from error


def decode_from_gateway(frame: bytes) -> list[ToController]:
    """Returns the messages of a gateway's frame. Raises ProtocolError."""
    try:
        return _to_controller.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a gateway: {error}") from error
