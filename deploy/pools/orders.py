"""The orders that an operator or the planner can give to the pools."""

from dataclasses import dataclass

from engine.config import PlannerMode
from engine.control import LiveSettings, Pools, Version
from engine.errors import BatonError
from engine.messages import Role, WorkerId


class OrderRefused(BatonError):
    """The machine refused an order and changed nothing.

    `status` is the HTTP status for the answer.
    """

    def __init__(self, reason: str, *, status: int = 409) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class SetPools:
    """Sets the number of workers of each role, by default for the current version."""

    pools: Pools
    version: str | None = None
    why: str = "ordered"


@dataclass(frozen=True, slots=True)
class Flip:
    """Gives a running worker another role. This also makes a drained worker serve again."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    """Takes all work from a worker. The worker keeps running until it is flipped or stopped."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Stop:
    """Drains a worker, then stops it."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class SetPlanner:
    """Switches the planner on, off, or to dry runs."""

    mode: PlannerMode


@dataclass(frozen=True, slots=True)
class Adjust:
    """Changes settings that are used only by the controller."""

    settings: LiveSettings


@dataclass(frozen=True, slots=True)
class AddVersion:
    """Adds a version beside the present versions. With `takes_over` the new version then replaces
    them.

    `canary` are the shares of new requests that the version gets first, in per cent. Each share
    lasts for `hold_s` seconds. None: the configured values.
    """

    version: Version
    takes_over: bool
    canary: tuple[int, ...] | None = None
    hold_s: float | None = None
    # True if it may be limited to shorter sequences than other versions.
    allows_shorter: bool = False


@dataclass(frozen=True, slots=True)
class Rollback:
    """Makes a former version take over again: the version that was replaced last, or the version
    `name`.

    If another version is taking over, its takeover is aborted.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Sets each version's weight: its share of new requests.

    A version that is not named keeps its weight.
    """

    weights: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finish:
    """Replaces all other versions with this version.

    `pools` are the version's final numbers of workers. Default: at least as many as the current
    version has.
    """

    name: str
    pools: Pools | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Removes a version. The current version gets the removed version's requests and workers."""

    name: str


Order = (
    SetPools
    | Flip
    | Drain
    | Stop
    | SetPlanner
    | Adjust
    | AddVersion
    | SetWeights
    | Finish
    | Abort
    | Rollback
)
