"""The messages between the controller of the pools and the gateways.

The controller dials each gateway. The first frames are `ControllerHello` and `GatewayWelcome`.
Frames are lists of messages, as in `engine.messages`. A gateway keeps the last `Members` that it
got, also while no controller runs. They include the operator's intent, so a new controller
learns it from any gateway and goes on with a higher number.

A *version* is a model and how workers serve it. Mostly there is one. During an update or a
comparison there are several, each with its own workers.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from engine.config import PlannerMode, WorkerConfig
from engine.demand import Observation
from engine.errors import ConfigError, ProtocolError
from engine.messages import MAX_FRAME_BYTES, GatewayId, RequestId, Role, WorkerId

CONTROL_VERSION = 4
MAX_LISTED = 1000  # requests in one answer
FIRST_VERSION = "v1"  # the name of the version that a deployment starts with
FULL_WEIGHT = 100


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
        """Returns the number of workers of a role; 0 for drained workers."""
        return 0 if role is Role.DRAINED else int(getattr(self, role))

    def moved(self, old: Role, new: Role) -> "Pools":
        """Returns the pools with one worker moved between roles."""
        return Pools(*(self.of(role) - (role is old) + (role is new) for role in SERVING_ROLES))

    def check(self) -> "Pools":
        """Returns itself. Raises ConfigError if these pools cannot serve."""
        if min(self.prefill, self.decode, self.mixed) < 0:
            raise ConfigError("a pool cannot have fewer than 0 workers")
        if not (self.mixed or (self.prefill and self.decode)):
            raise ConfigError("need a prefill and a decode worker, or a mixed one")
        return self


SERVING_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


class Version(msgspec.Struct, frozen=True):
    """A model, how workers serve it, and its share of the load.

    Requests are shared in proportion to the weights. A version that is leaving takes no new
    requests. After its last request its pools become empty; it is removed with its last worker.
    """

    name: str = FIRST_VERSION
    model: str = ""  # as `model_source` reads it
    model_name: str = ""  # in the API
    worker: WorkerConfig = WorkerConfig()
    pools: Pools = Pools()
    weight: int = FULL_WEIGHT
    is_leaving: bool = False

    @property
    def is_over(self) -> bool:
        """True if its workers are not needed any more."""
        return self.pools.total == 0

    def serves_like(self, other: "Version") -> bool:
        """True if both give the same answers: they differ at most in size, weight and leaving."""
        ours, theirs = (msgspec.structs.replace(each, **_AMOUNTS) for each in (self, other))
        return ours == theirs


_AMOUNTS = {"pools": Pools(), "weight": 0, "is_leaving": False}


class Rollout(msgspec.Struct, frozen=True):
    """A version takes over, worker by worker, from all others but those in `stay`."""

    to: str
    pools: Pools  # the final ones of `to`
    before: tuple[Version, ...]  # the versions at the start, restored by an abort
    stay: tuple[str, ...] = ()  # after an abort: those beside the current version


class Intent(msgspec.Struct, frozen=True):
    """The operator's intent. The first version is the current one."""

    versions: tuple[Version, ...] = (Version(),)
    planner: PlannerMode = PlannerMode.OFF
    drained: tuple[WorkerId, ...] = ()  # workers that keep running without work
    rollout: Rollout | None = None

    @property
    def current(self) -> Version:
        """The version that is served by default."""
        return self.versions[0]

    @property
    def pools(self) -> Pools:
        """The pools of the current version."""
        return self.current.pools

    def version(self, name: str) -> Version | None:
        """Returns the version of that name, or None."""
        return next((each for each in self.versions if each.name == name), None)

    def changed(self, name: str, **fields: object) -> "Intent":
        """Returns the intent with fields of one version changed."""
        versions = tuple(
            msgspec.structs.replace(each, **fields) if each.name == name else each
            for each in self.versions
        )
        return msgspec.structs.replace(self, versions=versions)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker that gateways use, for requests of its version only."""

    worker_id: WorkerId
    address: str
    version: str = FIRST_VERSION
    context_len: int = 0  # tokens of one sequence at most


# ---------------------------------------------------------------- controller to gateway


class ControllerHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a controller."""

    version: int


class Members(msgspec.Struct, frozen=True, tag=True):
    """All workers and the intent. A gateway that knows a higher number ignores it."""

    version: int  # of this list; not of a model
    workers: tuple[Member, ...]
    intent: Intent

    def of(self, name: str) -> tuple[Member, ...]:
        """Returns the workers of a version."""
        return tuple(member for member in self.workers if member.version == name)


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Asks for the requests that are served; at most `limit` are listed, oldest first."""

    question: int
    limit: int = MAX_LISTED


# ---------------------------------------------------------------- gateway to controller


class GatewayWelcome(msgspec.Struct, frozen=True, tag=True):
    """A gateway's answer to `ControllerHello`, with the last members that it got."""

    version: int
    gateway_id: GatewayId
    members: Members | None


class ControllerRefused(msgspec.Struct, frozen=True, tag=True):
    """A gateway's refusal of a `ControllerHello`."""

    reason: str


class VersionReport(msgspec.Struct, frozen=True):
    """A gateway's state of a version. `missing` is the reason why it cannot serve, or None."""

    missing: str | None
    num_requests: int  # accepted and not ended
    fingerprint: str


class GatewayReport(msgspec.Struct, frozen=True, tag=True):
    """A gateway's state, sent once a second. `missing` is why it cannot serve, or None.

    `seen` is the planner's input. It is None while the planner is off, and in the first second
    after it is switched on.
    """

    missing: str | None
    members_version: int
    num_workers: int  # with a session
    num_requests: int  # accepted and not ended
    num_waiting: int  # of these, requests that wait for a worker
    queued_s: float  # predicted time of one prefill worker for what waits
    seen: Observation | None = None
    versions: dict[str, VersionReport] = {}  # by name


class RequestState(StrEnum):
    """The stage of a request."""

    WAITING = "waiting"  # for a worker
    PREFILLING = "prefilling"
    PULLING = "pulling"  # its KV is on the way
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
    """The answer to `ListRequests`. `num_requests` counts also those that are not listed."""

    question: int
    num_requests: int
    requests: list[RequestInfo]


ToGateway = ControllerHello | Members | ListRequests
ToController = GatewayWelcome | ControllerRefused | GatewayReport | RequestList

_BAD_FRAME = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_to_gateway = msgspec.msgpack.Decoder(list[ToGateway])
_to_controller = msgspec.msgpack.Decoder(list[ToController])


def encode_control(messages: Sequence[ToGateway] | Sequence[ToController]) -> bytes:
    """Returns one frame, of either direction."""
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
