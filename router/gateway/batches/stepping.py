"""Requests of batches that pause for clients' requests, and later continue.

A gate limits how many batch requests run. If the limit falls, the gate withdraws the youngest
requests from their router within the same call. Later a withdrawn request continues as a new
request, whose prompt is the old prompt and all tokens so far. Lengths in `Limits` are absolute and
the noise of sampling is keyed by position. So the answer is the same as without a pause. The router
continues a lost request in the same way. Workers keep the blocks in their caches, so little is
computed twice.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context

from msgspec.structs import replace

from engine.config import MAX_PRIORITY
from engine.messages import RequestId
from router.machine.requests import Cancelled, Request, Update
from router.port import FrameTaker, Handle, RouterPort, Sink

BATCH_PRIORITY = MAX_PRIORITY + 1  # after all priorities that clients may use


class VersionLeaves(Exception):
    """The version of a paused request accepts no more requests.

    The request restarts at another version.
    """


class BatchGate:
    """Lets at most `num_allowed` requests run. The other requests wait, oldest first."""

    def __init__(self) -> None:
        self._requests: dict[SteppingRequest, None] = {}  # an ordered set, oldest first
        self.num_allowed = 0
        self.has_time: Callable[[], bool] = lambda: True  # must be true to let a request in
        self.on_request: Callable[[], object] = lambda: None  # called for each new request
        self._is_admitting = False
        self.num_paused = 0  # number of times that a request was paused

    @property
    def num_running(self) -> int:
        """The number of requests that the gate lets run."""
        return sum(each.is_in for each in self._requests)

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait to run."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait to run, including paused requests."""
        return len(self._requests) - self.num_running

    @property
    def num_free(self) -> int:
        """The number of requests that may still be added."""
        return max(self.num_allowed - len(self._requests), 0)

    def allow(self, number: int) -> None:
        """Sets the number of requests that may run.

        Withdraws the youngest running requests, or lets waiting requests in.
        """
        self.num_allowed = number
        self._withdraw(self.num_running - number)
        self.admit()

    def add(self, request: "SteppingRequest") -> None:
        """Adds a new request. If there is room, lets the oldest waiting request run."""
        self._requests[request] = None
        self.on_request()
        self.admit()

    def leave(self, request: "SteppingRequest") -> None:
        """Removes a request, unless it was removed before."""
        if request in self._requests:
            del self._requests[request]
            self.admit()

    def dismiss_leaving(self) -> None:
        """Fails, with VersionLeaves, waiting requests whose version is leaving."""
        for request in list(self._requests):
            request.dismiss()

    def _withdraw(self, number: int) -> None:
        """Withdraws the `number` youngest running requests from their routers."""
        running = [each for each in reversed(self._requests) if each.is_in]
        by_port: dict[int, tuple[RouterPort, list[RequestId]]] = {}
        for each in running[: max(number, 0)]:
            each.is_in = False
            if each.request_id is not None:
                self.num_paused += 1
                ids = by_port.setdefault(id(each.port), (each.port, []))[1]
                ids.append(each.request_id)
        for port, request_ids in by_port.values():
            port.withdraw(request_ids)

    def admit(self) -> None:
        """Lets the oldest waiting request in; the event loop's next iteration lets in another one.

        The router needs a fraction of a millisecond to submit a request, and other work should not
        wait for several submissions.
        """
        if self._is_admitting or self.num_running >= self.num_allowed:
            return
        waiting = next((each for each in self._requests if each.can_enter), None)
        if waiting is not None and self.has_time():
            self._is_admitting = True
            waiting.let_in()
            asyncio.get_running_loop().call_soon(self._admit_more, context=Context())

    def _admit_more(self) -> None:
        self._is_admitting = False
        self.admit()


class SteppingPort:
    """A version's router for requests of batches; implements `RequestPort`."""

    def __init__(self, port: RouterPort, gate: BatchGate, stays: Callable[[], bool]) -> None:
        self._port = port
        self._gate = gate
        self._stays = stays

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Adds a request to the gate, which starts and pauses it.

        The request may fail with VersionLeaves.
        """
        stepping = SteppingRequest(self._gate, self._port, self._stays, request, sink)
        self._gate.add(stepping)
        return stepping


class SteppingRequest:
    """A request at the gate.

    It is the `Handle` of the client's request, and the `Sink` of the parts into which pauses divide
    the request.
    """

    def __init__(
        self,
        gate: BatchGate,
        port: RouterPort,
        stays: Callable[[], bool],
        request: Request,
        sink: Sink,
    ) -> None:
        self.port = port
        self.is_in = False  # True while the gate lets the request run
        self.request_id: RequestId | None = None  # id of the present part; None at no router
        self._gate = gate
        self._stays = stays
        self._sink = sink
        self._request = _in_background(request)
        self._tokens: list[int] = []  # tokens of the answer so far
        self._num_parts = 0
        self._num_cached: int | None = None  # cached prompt tokens of the first part
        self._part: Handle | None = None
        self._has_token = False  # True once the present part has produced a token

    @property
    def can_enter(self) -> bool:
        """True if the request waits to be let in."""
        return not self.is_in and self.request_id is None

    def let_in(self) -> None:
        """Submits the next part of the request to the router."""
        self.is_in, self._has_token = True, False
        part = self._next_part()
        self.request_id = part.request_id
        self._part = self.port.submit(part, self)

    def dismiss(self) -> None:
        """Fails the request if it waits and its version is leaving."""
        if self.can_enter and not self._stays():
            self._gate.leave(self)
            self._sink.fail(VersionLeaves())

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Records tokens of the present part, and passes them to the sink."""
        self._record(token_ids)
        self._sink.tokens(token_ids, now_s)

    def update(self, update: Update) -> None:
        """Receives an update of the present part.

        The end of a paused part is not passed to the sink.
        """
        self._record(update.token_ids)
        if update.timeline is not None:  # replace the count by the first part's count
            if self._num_cached is None:
                self._num_cached = update.timeline.num_cached_tokens
            timeline = replace(update.timeline, num_cached_tokens=self._num_cached)
            update = replace(update, timeline=timeline)
        if update.outcome is not None:
            self.request_id = None
            if not self.is_in and isinstance(update.outcome, Cancelled):
                if update.token_ids:
                    self._sink.update(replace(update, outcome=None, timeline=None))
                self._gate.admit()
                return
            self._gate.leave(self)
        self._sink.update(update)

    def fail(self, error: Exception) -> None:
        """Passes an unexpected error to the sink."""
        self._sink.fail(error)

    def cancel(self) -> None:
        """Cancels the request at the gate and at its router."""
        self._gate.leave(self)
        if self._part is not None:
            self._part.cancel()

    def offer_frames(self, taker: FrameTaker) -> None:
        """Does nothing: this object must record each token, so C++ cannot read tokens from
        frames.
        """

    def _record(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids
        if token_ids and not self._has_token:  # the prompt is computed, so another may start
            self._has_token = True
            self._gate.admit()

    def _next_part(self) -> Request:
        """Returns the request for the rest of the answer.

        Each part has its own id, because messages of an earlier part may arrive late.
        """
        request, number = self._request, self._num_parts
        self._num_parts += 1
        if not number:
            return request
        return replace(
            request,
            request_id=RequestId(f"{request.request_id}~{number}"),
            token_ids=(*request.token_ids, *self._tokens),
            prompt_logprobs=None if self._tokens else request.prompt_logprobs,
            leader=None,
        )


def _in_background(request: Request) -> Request:
    """Returns the request with a priority below all clients' requests, and no deadlines.

    Among batches, the request's tenant gets a fair share.
    """
    return replace(
        request,
        priority=BATCH_PRIORITY,
        tenant=f"batch {request.tenant}",
        has_key=False,
        deadline_s=None,
        tpot_bound_s=None,
        is_background=True,
    )
