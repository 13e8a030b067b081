"""Requests of batches that pause for other requests, and continue where they stopped.

A gate lets a number of them run. If fewer may run, the gate withdraws the youngest from their
router within the same call. Later each continues as a new request whose prompt is the old prompt
and all tokens so far. Lengths in `Limits` are absolute and the noise of sampling is keyed by
position. So the tokens equal those of an undisturbed answer: the router continues a lost request in
the same way. Workers keep the blocks in their caches, so little is computed twice.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context

from msgspec.structs import replace

from engine.config import MAX_PRIORITY
from engine.messages import RequestId
from router.machine.requests import Cancelled, Request, Update
from router.port import FrameTaker, Handle, RouterPort, Sink

BATCH_PRIORITY = MAX_PRIORITY + 1  # behind all priorities of clients


class VersionLeaves(Exception):
    """A paused request's version takes no more requests; the request restarts elsewhere."""


class BatchGate:
    """Lets a number of requests run; the others wait, oldest first."""

    def __init__(self) -> None:
        self._requests: dict[SteppingRequest, None] = {}  # oldest first
        self.num_allowed = 0
        self.has_time: Callable[[], bool] = lambda: True  # checked before a request is let in
        self.on_request: Callable[[], object] = lambda: None  # called for each new request
        self._is_admitting = False
        self.num_paused = 0  # number of pauses so far

    @property
    def num_running(self) -> int:
        """The number of requests at a router."""
        return sum(each.is_in for each in self._requests)

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait to run."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait to run, paused or new."""
        return len(self._requests) - self.num_running

    @property
    def num_free(self) -> int:
        """The number of further requests that may be added."""
        return max(self.num_allowed - len(self._requests), 0)

    def allow(self, number: int) -> None:
        """Sets how many may run: withdraws the youngest ones, or lets waiting ones in."""
        self.num_allowed = number
        self._withdraw(self.num_running - number)
        self.admit()

    def add(self, request: "SteppingRequest") -> None:
        """Adds a new request, and lets it in at once if possible."""
        self._requests[request] = None
        self.on_request()
        self.admit()

    def leave(self, request: "SteppingRequest") -> None:
        """Removes a request, unless it was removed before."""
        if request in self._requests:
            del self._requests[request]
            self.admit()

    def dismiss_leaving(self) -> None:
        """Fails waiting requests whose version leaves with VersionLeaves."""
        for request in list(self._requests):
            request.dismiss()

    def _withdraw(self, number: int) -> None:
        """Withdraws the youngest running requests from their routers."""
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
        """Lets the oldest waiting request in, and the next one in the loop's next iteration.

        Submitting a request takes the router a fraction of a millisecond, and others should not
        wait for several.
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
        """Starts a request, and pauses it when the gate says so. May fail with VersionLeaves."""
        stepping = SteppingRequest(self._gate, self._port, self._stays, request, sink)
        self._gate.add(stepping)
        return stepping


class SteppingRequest:
    """A request at the gate: the `Handle` of the whole request, and the `Sink` of its parts."""

    def __init__(
        self,
        gate: BatchGate,
        port: RouterPort,
        stays: Callable[[], bool],
        request: Request,
        sink: Sink,
    ) -> None:
        self.port = port
        self.is_in = False  # True while the gate lets it run
        self.request_id: RequestId | None = None  # its id while a router has it
        self._gate = gate
        self._stays = stays
        self._sink = sink
        self._request = _in_background(request)
        self._tokens: list[int] = []  # tokens of the answer so far
        self._num_parts = 0
        self._num_cached: int | None = None  # cached prompt tokens in the first part
        self._part: Handle | None = None
        self._has_token = False  # the present part has produced a token

    @property
    def can_enter(self) -> bool:
        """True if the request waits to be let in."""
        return not self.is_in and self.request_id is None

    def let_in(self) -> None:
        """Lets the request run."""
        self.is_in, self._has_token = True, False
        part = self._next_part()
        self.request_id = part.request_id
        self._part = self.port.submit(part, self)

    def dismiss(self) -> None:
        """Fails the request if it waits and its version leaves."""
        if self.can_enter and not self._stays():
            self._gate.leave(self)
            self._sink.fail(VersionLeaves())

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Receives tokens of the present part."""
        self._record(token_ids)
        self._sink.tokens(token_ids, now_s)

    def update(self, update: Update) -> None:
        """Receives an update of the present part. The end of a paused part is not passed on."""
        self._record(update.token_ids)
        if update.timeline is not None:  # reports the cached tokens of the client's prompt
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
        """Receives an unexpected error."""
        self._sink.fail(error)

    def cancel(self) -> None:
        """Cancels the request."""
        self._gate.leave(self)
        if self._part is not None:
            self._part.cancel()

    def offer_frames(self, taker: FrameTaker) -> None:
        """Does nothing, as each token has to be recorded here."""

    def _record(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids
        if token_ids and not self._has_token:  # its prompt is computed; another may start
            self._has_token = True
            self._gate.admit()

    def _next_part(self) -> Request:
        """Returns the request of the rest. Each part has its own id, as messages may come late."""
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
    """Returns the request behind all others, with a fair share of its own among batches."""
    return replace(
        request,
        priority=BATCH_PRIORITY,
        tenant=f"batch {request.tenant}",
        has_key=False,
        deadline_s=None,
        tpot_bound_s=None,
        is_background=True,
    )
