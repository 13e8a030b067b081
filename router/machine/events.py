"""Events and effects of the request machine.

Events that occur once per token or per step are msgspec structs. Creating a msgspec struct takes a
fifth of the time that a dataclass takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.messages import RequestId, ToGateway, Tokens, ToWorker, Welcome, WorkerId
from engine.worker.block_events import BlockEvent
from router.machine.requests import Request, Update

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker has accepted this gateway's connection with a `Welcome`."""

    info: Welcome


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The connection to a worker broke."""

    worker_id: WorkerId
    reason: str


class Arrived(msgspec.Struct, frozen=True):
    """A client's request arrived, validated and tokenised.

    Requests that arrive together are placed together, short prompts first. All of them except the
    last have `more_come=True`.
    """

    request: Request
    more_come: bool = False


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client disconnected, or a stop string ended the answer."""

    request_id: RequestId


class FromWorker(msgspec.Struct, frozen=True):
    """A message arrived from a worker."""

    worker_id: WorkerId
    message: ToGateway


class Stepped(msgspec.Struct, frozen=True):
    """The tokens of a worker's step, equivalent to one `FromWorker` per message in this order."""

    worker_id: WorkerId
    tokens: Sequence[Tokens]


class BlocksChanged(msgspec.Struct, frozen=True):
    """A worker's block events. After the first batch, only events change its known blocks."""

    worker_id: WorkerId
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class BlockEventsMissed:
    """Block events of a worker were lost. Its known blocks are stale until its next snapshot."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The machine handles the deadlines and retries that are due."""


RouterEvent = (
    WorkerJoined
    | WorkerLost
    | Arrived
    | ClientGone
    | FromWorker
    | Stepped
    | BlocksChanged
    | BlockEventsMissed
    | Tick
)

# ---------------------------------------------------------------- effects


class SendTo(msgspec.Struct, frozen=True):
    """Effect: send a message to a worker."""

    worker_id: WorkerId
    message: ToWorker


RouterEffect = SendTo | Update
