"""The interface between the HTTP side and the router, so that both can be tested alone."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import LoadReport, RequestId, Role, SeqId, StoreHint, WorkerId
from router.cluster.learning import MovedKv
from router.machine.requests import Forecast, Request, Timeline, Update, joined


class Sink(Protocol):
    """Receives the answer to one request, in calls that do not block.

    A sink stores the updates that a slow client has not read yet. An exception in a call ends the
    answer: see `fail`.
    """

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Receives tokens without log-probabilities and timeline, which arrived at `now_s`."""
        ...

    def update(self, update: Update) -> None:
        """Receives an update. The last one has an outcome, and may come before `submit` returns."""
        ...

    def fail(self, error: Exception) -> None:
        """Receives the exception of a bug that affects this request. No further call follows."""
        ...


class FrameTaker(Protocol):
    """Decodes the tokens of running answers directly from the frames of workers."""

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Handles those messages in a frame that have only tokens, for the sequences it reads.

        After another message of a sequence, the frame's tokens for this sequence are not handled.
        Returns the positions of all messages that were not handled; None if no token was handled.
        """
        ...

    def close(self, seq_id: SeqId) -> None:
        """Stops handling the tokens of this sequence."""
        ...


class Handle(Protocol):
    """The caller's handle of a running request."""

    def cancel(self) -> None:
        """Cancels the request. Its sink receives nothing more. Always call this at the end."""
        ...

    def offer_frames(self, taker: FrameTaker) -> SeqId | None:
        """Offers frames to `taker` from now on, before their tokens are passed to sinks.

        Returns the sequence that produces the next tokens of the answer; None if tokens cannot be
        read from frames.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as known to the router."""

    role: Role
    load: LoadReport | None
    reserved_blocks: int
    reserved_tokens: int
    forecast: Forecast = field(default_factory=Forecast)
    max_running: int = 0  # maximum number of decoding sequences
    num_foreign: int = 0  # number of other gateways' sequences and prompts at its last report
    kernels: str = ""  # name of its compute kernels
    num_blocks: int = 0  # KV blocks in the worker's pool


class RouterStatus(Protocol):
    """The visible state of a router, or of several routers together."""

    def readiness(self) -> str | None:
        """Returns what is missing to serve requests; None if nothing is."""
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
        """The predicted seconds for one prefill worker to compute all waiting prompts."""
        ...

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Pairs of a source and a sink without pulls now, with the seconds until the next try."""
        ...

    def transfers(self) -> list[MovedKv]:
        """Returns the KV that was pulled since the start, by pair of workers."""
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
    """A sink that collects the whole answer, for `ask`."""

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
    """Returns the whole answer as one update. Cancelling the call cancels the request."""
    sink = _WholeAnswer()
    handle = port.submit(request, sink)
    try:
        return await sink.answer
    finally:
        handle.cancel()


class RouterPort(RouterStatus, RequestPort, Protocol):
    """The whole interface of a router for the HTTP side."""

    def capacity_tokens(self) -> int | None:
        """The length of the longest request that the workers could serve; None while unknown."""
        ...

    def timelines(self, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Timeline]:
        """Returns the stages so far of those given requests that this router has."""
        ...

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        """Cancels requests before it returns. Each request gets a last update with that outcome."""
        ...

    def store_block_size(self) -> int | None:
        """Tokens per block of the stores; None if no store is connected. Thread-safe."""
        ...

    def tell_stores(self, hint: StoreHint) -> None:
        """Sends a client's message to each connected store."""
        ...
