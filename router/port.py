"""The interface between the HTTP side and the router: each is tested without the other."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import LoadReport, RequestId, Role, SeqId, StoreHint, WorkerId
from router.cluster.learning import MovedKv
from router.machine.requests import Forecast, Request, Timeline, Update, joined


class Sink(Protocol):
    """Receives the answer to one request, in calls that do not wait.

    It keeps updates that a slow client has not read. An exception in a call ends the answer: see
    `fail`.
    """

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Receives plain tokens, and their time of arrival in seconds."""
        ...

    def update(self, update: Update) -> None:
        """Receives an update. The last has an outcome; it may come before `submit` returns."""
        ...

    def fail(self, error: Exception) -> None:
        """Receives a bug met by this request. No further call follows."""
        ...


class FrameTaker(Protocol):
    """Reads the tokens of running answers directly from the frames of workers."""

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Handles messages with only tokens, for sequences that it knows.

        After another message of a sequence, the frame's tokens for it are not handled. Returns the
        positions of all other messages; None if no token was handled.
        """
        ...

    def close(self, seq_id: SeqId) -> None:
        """Stops handling tokens of this sequence."""
        ...


class Handle(Protocol):
    """A request at a router."""

    def cancel(self) -> None:
        """Cancels the request; its sink gets nothing more. Always call it at the end."""
        ...

    def offer_frames(self, taker: FrameTaker) -> SeqId | None:
        """Offers frames to `taker` from now on, before their tokens go to sinks.

        Returns the sequence that produces the next tokens of the answer; None if tokens may not be
        read from frames.
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
    max_running: int = 0  # maximum number of decoding sequences
    num_foreign: int = 0  # sequences and prompts of other gateways at its last report
    kernels: str = ""  # its compute kernels
    num_blocks: int = 0  # KV blocks in the worker's pool


class RouterStatus(Protocol):
    """The visible state of a router, or of several routers together."""

    def readiness(self) -> str | None:
        """Returns None if requests can be served, otherwise what is missing."""
        ...

    def fingerprint(self) -> str:
        """Returns a text that identifies model and configuration; empty until a worker is known."""
        ...

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """Returns all live workers."""
        ...

    def queue_len(self) -> int:
        """The number of requests that wait in the router for a worker."""
        ...

    def queued_s(self) -> float:
        """Predicted seconds for one prefill worker to compute the waiting prompts."""
        ...

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Pairs of a source and a sink that are not used now, with seconds until the next try."""
        ...

    def transfers(self) -> list[MovedKv]:
        """Returns the KV that moved between workers since the start, by pair."""
        ...

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Router events since the start by (name, reason): retries, refusals, fallbacks."""
        ...


class RequestPort(Protocol):
    """Accepts requests for a router."""

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Starts a request; its answer goes to `sink`."""
        ...


class _WholeAnswer:
    """The sink of `ask`: collects an answer until it is complete."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Update] = asyncio.get_running_loop().create_future()
        self._updates: list[Update] = []

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        self._updates.append(Update(tuple(token_ids)))

    def update(self, update: Update) -> None:
        self._updates.append(update)
        if update.outcome is not None and not self.answer.done():  # done if cancelled
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
    """The interface of a router for the HTTP side."""

    def capacity_tokens(self) -> int | None:
        """The length of the longest request that workers could hold; None while unknown."""
        ...

    def timelines(self, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Timeline]:
        """Returns the stages so far of those requests that this router has."""
        ...

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        """Cancels requests within this call; the last update of each says so."""
        ...

    def store_block_size(self) -> int | None:
        """Tokens per block in stores; None if no store is connected. Thread-safe."""
        ...

    def tell_stores(self, hint: StoreHint) -> None:
        """Passes a client's message on to each connected store."""
        ...
