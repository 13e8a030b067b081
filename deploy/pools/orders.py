"""Orders that an operator or the planner gives to the pools."""

from dataclasses import dataclass

from engine.config import PlannerMode
from engine.control import LiveSettings, Pools, Version
from engine.errors import BatonError
from engine.messages import Role, WorkerId


class OrderRefused(BatonError):
    """An order that was refused and has changed nothing. `status` is an HTTP status."""

    def __init__(self, reason: str, *, status: int = 409) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class SetPools:
    """Sets the number of workers of each role, by default of the current version."""

    pools: Pools
    version: str | None = None
    why: str = "ordered"


@dataclass(frozen=True, slots=True)
class Flip:
    """Gives a running worker another role. A drained worker serves again."""

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
    """Switches the planner on, off, or to a dry run."""

    mode: PlannerMode


@dataclass(frozen=True, slots=True)
class Adjust:
    """Changes settings that only the controller uses."""

    settings: LiveSettings


@dataclass(frozen=True, slots=True)
class AddVersion:
    """Adds a version beside the present ones. With `takes_over` it then replaces them.

    `canary` are the shares of new requests that the version gets first, in per cent. Each share is
    held for `hold_s`. None: as configured.
    """

    version: Version
    takes_over: bool
    canary: tuple[int, ...] | None = None
    hold_s: float | None = None
    allows_shorter: bool = False  # it may hold shorter sequences than other versions


@dataclass(frozen=True, slots=True)
class Rollback:
    """Brings back the version that was replaced last, or the version named `name`.

    A running takeover of another version is aborted.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Sets the shares of new requests by version. A version not named keeps its weight."""

    weights: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finish:
    """Replaces all other versions with this version.

    `pools` are its final workers. By default, at least the workers of the current version.
    """

    name: str
    pools: Pools | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Removes a version and gives its requests and workers back to the current version."""

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
