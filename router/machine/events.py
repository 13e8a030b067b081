"""Events and effects of the request machine.

Kinds that occur once a token or a step are msgspec structs, which are made in a fifth of the time
of a dataclass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.messages import Logprobs, RequestId, ToGateway, Tokens, ToWorker, Welcome, WorkerId
from engine.worker.block_events import BlockEvent
from router.machine.requests import Outcome, Request, Timeline

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker welcomed this gateway."""

    info: Welcome


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's stream broke."""

    worker_id: WorkerId
    reason: str


class Arrived(msgspec.Struct, frozen=True):
    """A client's request, validated and tokenised.

    Requests that come at one moment are placed together, short prompts first. All but the last of
    them say that more come.
    """

    request: Request
    more_come: bool = False


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client left, or a stop string ended the answer."""

    request_id: RequestId


class FromWorker(msgspec.Struct, frozen=True):
    """A worker's message."""

    worker_id: WorkerId
    message: ToGateway


class Stepped(msgspec.Struct, frozen=True):
    """The tokens of one step of a worker. Equals a `FromWorker` for each, in this order."""

    worker_id: WorkerId
    tokens: Sequence[Tokens]


class BlocksChanged(msgspec.Struct, frozen=True):
    """A worker's block events. From the first on, only they say what it caches."""

    worker_id: WorkerId
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class BlockEventsMissed:
    """Block events of a worker were lost: they are out of date until its next snapshot."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, and nothing else happened."""


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
    """Send a message to a worker."""

    worker_id: WorkerId
    message: ToWorker


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Give tokens to the client; with the first two, when stages end, the timeline.

    One is made and recorded for each token, so it has no outcome. An `Update` is what the shell
    makes of one or more `Deliver`s of a request and its `End`. It has no request id, as its client
    follows one request. So these are two types.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    timeline: Timeline | None = None
    logprobs: tuple[Logprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[Logprobs, ...] = ()
    embedding: bytes = b""  # as in `engine.messages.PrefillDone`

    @property
    def is_plain(self) -> bool:
        """True if it brings only tokens."""
        scores = self.logprobs or self.prompt_logprobs or self.embedding
        return self.timeline is None and not scores


class End(msgspec.Struct, frozen=True):
    """The request is over: no effect of it follows."""

    request_id: RequestId
    outcome: Outcome
    timeline: Timeline


RouterEffect = SendTo | Deliver | End
