"""The seam between the HTTP side and the router: each side is tested without the other."""

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import LoadReport, RequestId, Role, SeqId, StoreHint, WorkerId
from router.cluster.transfers import MovedKv
from router.machine.requests import Forecast, Request, Timeline, Update

# Takes an update in the call in which it arrives. Returns False to leave it to the iterator.
TakeAtOnce = Callable[[Update], bool]

# Takes the tokens of an update with tokens alone, and its time of arrival in seconds.
TakeTokens = Callable[[Sequence[int], float], bool]


class StepTaker(Protocol):
    """Takes the tokens of running answers from the frames of workers, and sends them.

    The way of one sequence's tokens is its *lane*. As long as it is open, the client of the answer
    gets updates only through `take_frame`.
    """

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Takes what a frame has for open lanes: messages with tokens and nothing else.

        Behind other news of a sequence, the frame's tokens for it are not taken. Returns the places
        of all other messages; None if nothing was taken.
        """
        ...

    def close_lane(self, seq_id: SeqId) -> None:
        """Closes a lane, if it is open. It may also close by itself."""
        ...


# Opens a lane for the sequence of an answer that is under way, if that is possible now.
OpenLane = Callable[[SeqId], StepTaker | None]


def open_no_lane(_: SeqId) -> None:
    """The default `OpenLane`: all tokens are updates."""


def take_nothing(_: Update) -> bool:
    """The default `TakeAtOnce`: every update comes out of the iterator."""
    return False


def take_no_tokens(_: Sequence[int], __: float) -> bool:
    """The default `TakeTokens`: tokens are updates like others."""
    return False


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the router sees it."""

    role: Role
    load: LoadReport | None
    reserved_blocks: int
    reserved_tokens: int
    forecast: Forecast = field(default_factory=Forecast)
    max_running: int = 0  # sequences that may decode at once
    num_foreign: int = 0  # sequences and prompts of other gateways, at its last report
    kernels: str = ""  # what computes there
    num_blocks: int = 0  # KV blocks of the worker's pool


class RouterStatus(Protocol):
    """The visible state of a router, or of several routers together."""

    def readiness(self) -> str | None:
        """Returns None if requests can be served, else what is missing."""
        ...

    def fingerprint(self) -> str:
        """Identifies model and configuration in answers; empty until a worker is known."""
        ...

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """All live workers."""
        ...

    def queue_len(self) -> int:
        """Requests that wait in the router for a worker."""
        ...

    def queued_s(self) -> float:
        """Predicted seconds of one prefill worker to compute what waits."""
        ...

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Pairs of a source and a sink that are not used now, and seconds until a new try."""
        ...

    def transfers(self) -> list[MovedKv]:
        """KV that moved between workers since start, by pair."""
        ...

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Router-side events since start by (name, reason): retries, refusals, fallbacks."""
        ...


class RequestPort(Protocol):
    """The way of requests to a router."""

    def submit(
        self,
        request: Request,
        take_at_once: TakeAtOnce = take_nothing,
        take_tokens: TakeTokens = take_no_tokens,
        open_lane: OpenLane = open_no_lane,
    ) -> AsyncGenerator[Update, None]:
        """Starts a request. Closing the iterator before its last update cancels the request.

        Each update is first offered to `take_at_once`. If that returns True, the iterator does not
        yield the update. So most tokens are sent as they arrive, and wait for no task. An update of
        tokens alone is offered to `take_tokens` before. Where that takes them, a lane may be opened
        for the next ones.
        """
        ...


class RouterPort(RouterStatus, RequestPort, Protocol):
    """A router as the HTTP side uses it."""

    def capacity_tokens(self) -> int | None:
        """The length of the longest request that workers could hold; None until it is known."""
        ...

    def timelines(self, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Timeline]:
        """The stages up to now of those requests that this router has."""
        ...

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        """Cancels requests within this call; the last update of each says so."""
        ...

    def store_block_size(self) -> int | None:
        """The tokens of a block in stores; None if no store is connected. Thread-safe."""
        ...

    def tell_stores(self, hint: StoreHint) -> None:
        """Passes on what a client says to each store that is connected."""
        ...
