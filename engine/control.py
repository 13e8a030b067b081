"""What the controller of the pools and the gateways tell each other: one schema.

The controller dials every gateway; the first frame each way is `ControllerHello` and
`GatewayWelcome`. Frames are lists of messages, as in `engine.messages`. A gateway keeps the last
`Members` that it was told, also while no controller is there: with them it keeps what the operator
wants, so that a controller that was started again learns that too and goes on with a higher
number.

A *version* is a model and how workers serve it. Mostly there is one; while a deployment is updated,
or two are compared, there are several, each with workers of its own.
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
FIRST_VERSION = "v1"  # the name of what a deployment is started with
FULL_WEIGHT = 100


class Pools(msgspec.Struct, frozen=True):
    """How many workers of each role."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0

    @property
    def total(self) -> int:
        """Workers of all roles."""
        return self.prefill + self.decode + self.mixed

    def of(self, role: Role) -> int:
        """Workers of that role; none are wanted that are there for nothing."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}.get(
            role, 0
        )

    def moved(self, old: Role, new: Role) -> "Pools":
        """With one worker less of one role and one more of another."""
        counts = {role: self.of(role) for role in SERVING_ROLES}
        for role, change in ((old, -1), (new, 1)):
            if role in counts:
                counts[role] += change
        return Pools(*(counts[role] for role in SERVING_ROLES))

    def check(self) -> "Pools":
        """Itself. Raises ConfigError if it could not serve anything."""
        if min(self.prefill, self.decode, self.mixed) < 0:
            raise ConfigError("a pool cannot have fewer than 0 workers")
        if not (self.mixed or (self.prefill and self.decode)):
            raise ConfigError("need a prefill and a decode worker, or a mixed one")
        return self


SERVING_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


class Version(msgspec.Struct, frozen=True):
    """A model, how workers serve it, and how much of the load they are to have.

    Requests are shared in proportion to the weights. One that is leaving takes no new ones; when
    the last of its requests is over its pools are empty, and it is gone with its last worker.
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
        """Whether nobody needs its workers any more."""
        return self.pools.total == 0

    def serves_like(self, other: "Version") -> bool:
        """Whether the same requests get the same answers: all but how much it serves is equal."""
        ours, theirs = (msgspec.structs.replace(each, **_AMOUNTS) for each in (self, other))
        return ours == theirs


_AMOUNTS = {"pools": Pools(), "weight": 0, "is_leaving": False}


class Rollout(msgspec.Struct, frozen=True):
    """A version takes over from all others but those that stay, worker by worker."""

    to: str
    pools: Pools  # what it is to have in the end
    before: tuple[Version, ...]  # all as they were, and are again if that is given up
    stay: tuple[str, ...] = ()  # where one was given up: those beside the current version


class Intent(msgspec.Struct, frozen=True):
    """What the operator wants. The first version is the current one; others come and go."""

    versions: tuple[Version, ...] = (Version(),)
    planner: PlannerMode = PlannerMode.OFF
    drained: tuple[WorkerId, ...] = ()  # to stay, and without work
    rollout: Rollout | None = None

    @property
    def current(self) -> Version:
        """What is served unless somebody says otherwise."""
        return self.versions[0]

    @property
    def pools(self) -> Pools:
        """Of the current version."""
        return self.current.pools

    def version(self, name: str) -> Version | None:
        """The one of that name."""
        return next((each for each in self.versions if each.name == name), None)

    def changed(self, name: str, **fields: object) -> "Intent":
        """With one version changed."""
        versions = tuple(
            msgspec.structs.replace(each, **fields) if each.name == name else each
            for each in self.versions
        )
        return msgspec.structs.replace(self, versions=versions)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker that gateways are to use, for requests of its version alone."""

    worker_id: WorkerId
    address: str
    version: str = FIRST_VERSION
    context_len: int = 0  # tokens that a sequence of its may have


# ---------------------------------------------------------------- controller to gateway


class ControllerHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a controller."""

    version: int


class Members(msgspec.Struct, frozen=True, tag=True):
    """All workers. Who has heard a higher number ignores it."""

    version: int  # of this list; not of a model
    workers: tuple[Member, ...]
    intent: Intent

    def of(self, name: str) -> tuple[Member, ...]:
        """Workers of the version of that name."""
        return tuple(member for member in self.workers if member.version == name)


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Which requests are being served? At most so many are listed, the oldest ones."""

    question: int
    limit: int = MAX_LISTED


# ---------------------------------------------------------------- gateway to controller


class GatewayWelcome(msgspec.Struct, frozen=True, tag=True):
    """A gateway's answer to `ControllerHello`: the last members that it was told."""

    version: int
    gateway_id: GatewayId
    members: Members | None


class ControllerRefused(msgspec.Struct, frozen=True, tag=True):
    """Its other answer."""

    reason: str


class VersionReport(msgspec.Struct, frozen=True):
    """How a gateway serves a version. `missing` is what keeps it from it, None if nothing does."""

    missing: str | None
    num_requests: int  # accepted and not over
    fingerprint: str


class GatewayReport(msgspec.Struct, frozen=True, tag=True):
    """Said once a second. `missing` is what keeps it from serving, None where nothing does.

    `seen` is what the planner goes by; None where the last members say that it is off, and until a
    second has been observed since.
    """

    missing: str | None
    members_version: int
    num_workers: int  # that it has a session with
    num_requests: int  # accepted and not over
    num_waiting: int  # of these, for a worker
    queued_s: float  # predicted seconds of one prefill worker to compute what waits
    seen: Observation | None = None
    versions: dict[str, VersionReport] = {}  # by name


class RequestState(StrEnum):
    """How far a request has come."""

    WAITING = "waiting"  # for a worker
    PREFILLING = "prefilling"
    PULLING = "pulling"  # its KV is on the way
    DECODING = "decoding"


class RequestInfo(msgspec.Struct, frozen=True):
    """One request that is being served. Lengths in tokens."""

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
    """The answer to `ListRequests`; there are `num_requests`, not all of which may be listed."""

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
    """One frame of either direction."""
    frame = _encoder.encode(messages)
    assert len(frame) <= MAX_FRAME_BYTES
    return frame


def decode_from_controller(frame: bytes) -> list[ToGateway]:
    """Messages of a controller's frame. Raises ProtocolError."""
    try:
        return _to_gateway.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a controller: {error}") from error


def decode_from_gateway(frame: bytes) -> list[ToController]:
    """Messages of a gateway's frame. Raises ProtocolError."""
    try:
        return _to_controller.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a gateway: {error}") from error
