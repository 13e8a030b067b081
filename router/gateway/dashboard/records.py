"""The dashboard's records of running and ended requests, and of each second.

Plain data. Times are seconds on the gateway's clock.
"""

from typing import NamedTuple, Protocol

import msgspec

from engine.messages import RequestId
from router.gateway.dashboard.segments import Segment, Spent
from router.machine.requests import Outcome, Request, Timeline


class Bounds(msgspec.Struct, frozen=True):
    """The service level objective, in seconds. None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_set(self) -> bool:
        """True if there is a bound to be judged by."""
        return self.ttft_s is not None or self.tpot_s is not None


class EndedRequest(msgspec.Struct, frozen=True):
    """One answer that is over. `missed` names the stage that broke a bound; empty if none did."""

    number: int
    id: str  # the id that the client knows
    request_id: RequestId  # the server's own id of one choice
    version: str
    tenant: str
    outcome: str
    reason: str  # why it failed, or the finish reason
    received_s: float
    e2e_s: float  # to its last token
    ttft_s: float | None
    tpot_s: float | None
    prompt_tokens: int
    answer_tokens: int
    is_background: bool
    missed: str
    timeline: Timeline | None
    segments: list[Segment] = []
    spent: Spent = Spent()


class RunningAnswer(Protocol):
    """One answer that grows, or that is over."""

    outcome: Outcome | None  # None: it runs, or its client has left

    @property
    def request(self) -> Request:
        """What was asked."""
        ...

    @property
    def timeline(self) -> Timeline | None:
        """The stages, from the first token on."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        ...

    @property
    def last_s(self) -> float:
        """The time of its last tokens; 0 before the first."""
        ...


class RunningChoice(NamedTuple):
    """One answer, with the id that its client knows and the version that gives it."""

    shown_id: str
    version: str
    answer: RunningAnswer


class RunningRequest(msgspec.Struct, frozen=True):
    """One answer that is not over. Its timeline is None while no router has it."""

    id: str
    request_id: RequestId
    version: str
    tenant: str
    received_s: float
    prompt_tokens: int
    answer_tokens: int
    is_background: bool
    timeline: Timeline | None
    segments: list[Segment] = []
    spent: Spent = Spent()


class Hits(msgspec.Struct):
    """Tokens of prompts, by where they came from. `infinite`: a cache that forgets nothing."""

    prompt_tokens: int = 0
    local: int = 0  # cached in the worker that prefilled
    peer: int = 0  # pulled from another worker's cache
    infinite: int = 0


class Totals(msgspec.Struct):
    """Counts since the start of the process."""

    ended: int = 0
    good: int = 0  # finished within bounds
    unbounded: int = 0  # finished, and no bound was set for them
    prompt_tokens: int = 0
    answer_tokens: int = 0
    missed: dict[str, int] = {}


class TimeSpread(msgspec.Struct, frozen=True):
    """The middle and the slow end of several times, in seconds."""

    p50_s: float
    p95_s: float


class Sample(msgspec.Struct, frozen=True):
    """One second: requests that wait and run at its end, and requests that ended or came in it.

    `ttft` is about answers that began, `tpot` about answers that go on; None without such answers.
    """

    number: int
    at_s: float
    queue: int
    in_flight: int
    ended: int
    good: int
    unbounded: int
    prompt_tokens: int  # in requests that ended
    answer_tokens: int  # sent, of all requests
    missed: dict[str, int]
    ttft: TimeSpread | None = None
    tpot: TimeSpread | None = None
    waiting_s: float = 0.0  # the longest time for which a request waits for its first token
    num_stalled: int = 0  # answers that began and stand still
