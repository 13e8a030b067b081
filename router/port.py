"""The seam between the HTTP side and the router: each side is tested without the other."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import LoadReport, RequestId, Role, SeqId, StoreHint, WorkerId
from router.cluster.learning import MovedKv
from router.machine.requests import Forecast, Request, Timeline, Update, joined


class Sink(Protocol):
    """Gets the answer to one request, in calls that do not wait.

    It keeps what a slow client has not read. An exception of a call ends the answer: see `fail`.
    """

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Gets tokens with nothing beside them, and their time of arrival in seconds."""
        ...

    def update(self, update: Update) -> None:
        """Gets an update. The last one has an outcome; it may come before `submit` returns."""
        ...

    def fail(self, error: Exception) -> None:
        """Gets a bug that this request has met. Nothing else may come."""
        ...


class FrameTaker(Protocol):
    """Takes the tokens of running answers straight from the frames of workers."""

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Takes messages with tokens and nothing else, of sequences that it knows.

        Behind other news of a sequence, the frame's tokens for it are not taken. Returns the places
        of all other messages; None if nothing was taken.
        """
        ...

    def close(self, seq_id: SeqId) -> None:
        """Takes no more tokens of this sequence."""
        ...


class Handle(Protocol):
    """A request that a router has."""

    def cancel(self) -> None:
        """Ends the request; its sink gets nothing more. To be called in any case, at the end."""
        ...

    def offer_frames(self, taker: FrameTaker) -> SeqId | None:
        """Offers frames to `taker` from now on, before their tokens go to sinks.

        Returns the sequence that the next tokens of the answer come from; None if no sequence may
        be taken from frames.
        """
        ...


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

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Starts a request, whose answer goes to `sink`."""
        ...


class _WholeAnswer:
    """The sink of `ask`: keeps an answer until it is complete."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Update] = asyncio.get_running_loop().create_future()
        self._updates: list[Update] = []

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        self._updates.append(Update(tuple(token_ids)))

    def update(self, update: Update) -> None:
        self._updates.append(update)
        if update.outcome is not None and not self.answer.done():  # a cancelled call is done
            self.answer.set_result(joined(self._updates))

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


async def ask(port: RequestPort, request: Request) -> Update:
    """Returns the whole answer to a request as one update. A cancelled call cancels the request."""
    sink = _WholeAnswer()
    handle = port.submit(request, sink)
    try:
        return await sink.answer
    finally:
        handle.cancel()


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
