"""Requests of batches that step aside for others, and go on where they stopped.

A gate lets a number of them run. If fewer may run, it withdraws the youngest from their router
within the same call. Later they go on as a request whose prompt is the prompt and all tokens so
far. Lengths in `Limits` are absolute and the noise of sampling is keyed by position, so the tokens
equal an undisturbed answer's: the router continues a lost request in the same way. Workers
keep the blocks in their caches, so little is computed twice.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import Context

from msgspec.structs import replace

from engine.config import MAX_PRIORITY
from engine.messages import RequestId
from router.machine.requests import Cancelled, Request, Timeline, Update
from router.port import (
    OpenLane,
    RouterPort,
    TakeAtOnce,
    TakeTokens,
    open_no_lane,
    take_no_tokens,
    take_nothing,
)

BATCH_PRIORITY = MAX_PRIORITY + 1  # behind all that clients may ask for


class VersionLeaves(Exception):
    """A paused request's version takes no more requests: the request starts again elsewhere."""


class BatchGate:
    """Lets a number of requests run; the others wait, oldest first."""

    def __init__(self) -> None:
        self._tickets: dict[Ticket, None] = {}  # oldest first
        self.num_allowed = 0
        self.has_time: Callable[[], bool] = lambda: True  # asked before one more is let in
        self.on_ticket: Callable[[], object] = lambda: None  # called for each new request
        self._is_admitting = False
        self.num_paused = 0  # pauses so far

    @property
    def num_running(self) -> int:
        """Requests that a router has."""
        return sum(ticket.is_in for ticket in self._tickets)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait to run."""
        return len(self._tickets)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, paused or new."""
        return len(self._tickets) - self.num_running

    @property
    def num_free(self) -> int:
        """Requests that may come in addition."""
        return max(self.num_allowed - len(self._tickets), 0)

    def allow(self, number: int) -> None:
        """Sets how many may run: withdraws the youngest of too many, or lets waiting ones in."""
        self.num_allowed = number
        self._withdraw(self.num_running - number)
        self.admit()

    def ticket(self, port: RouterPort, stays: Callable[[], bool]) -> "Ticket":
        """Returns the ticket of a new request of a version that `stays` or leaves."""
        ticket = Ticket(self, port, stays)
        self._tickets[ticket] = None
        self.on_ticket()
        return ticket

    def leave(self, ticket: "Ticket") -> None:
        """Ends a request."""
        del self._tickets[ticket]
        self.admit()

    def dismiss_leaving(self) -> None:
        """Ends the wait of requests whose version leaves, with VersionLeaves."""
        for ticket in list(self._tickets):
            ticket.dismiss()

    def _withdraw(self, number: int) -> None:
        """Takes the youngest running requests from their routers."""
        running = [ticket for ticket in reversed(self._tickets) if ticket.is_in]
        by_port: dict[int, tuple[RouterPort, list[RequestId]]] = {}
        for ticket in running[: max(number, 0)]:
            ticket.is_in = False
            if ticket.request_id is not None:
                self.num_paused += 1
                ids = by_port.setdefault(id(ticket.port), (ticket.port, []))[1]
                ids.append(ticket.request_id)
        for port, request_ids in by_port.values():
            port.withdraw(request_ids)

    def admit(self) -> None:
        """Lets the oldest waiting request in, and the next one in the loop's next turn.

        To submit one takes the router a part of a millisecond, which others should not wait for.
        """
        if self._is_admitting or self.num_running >= self.num_allowed:
            return
        waiting = next((ticket for ticket in self._tickets if ticket.can_enter), None)
        if waiting is not None and self.has_time():
            waiting.let_in()
            self._is_admitting = True
            asyncio.get_running_loop().call_soon(self._admit_more, context=Context())

    def _admit_more(self) -> None:
        self._is_admitting = False
        self.admit()


class Ticket:
    """The place of one request at the gate."""

    def __init__(self, gate: BatchGate, port: RouterPort, stays: Callable[[], bool]) -> None:
        self.port = port
        self.is_in = False
        self.request_id: RequestId | None = None  # its id while a router has it
        self._gate = gate
        self._stays = stays
        self._entry: asyncio.Future[None] | None = None

    @property
    def can_enter(self) -> bool:
        """True if the request waits to be let in."""
        return not self.is_in and self._entry is not None and not self._entry.done()

    async def enter(self) -> None:
        """Waits until the request may run. Raises VersionLeaves."""
        while not self.is_in:
            self._entry = asyncio.get_running_loop().create_future()
            self._gate.admit()
            try:
                await self._entry
            finally:
                self._entry = None  # it holds the error, whose traceback holds this frame

    def let_in(self) -> None:
        """Lets the request run."""
        assert self._entry is not None
        self.is_in = True
        self._entry.set_result(None)

    def dismiss(self) -> None:
        """Ends the wait of a request whose version leaves."""
        if self.can_enter and not self._stays():
            assert self._entry is not None
            self._entry.set_exception(VersionLeaves())


class SteppingPort:
    """A version's router for requests of batches; implements `RequestPort`."""

    def __init__(self, port: RouterPort, gate: BatchGate, stays: Callable[[], bool]) -> None:
        self._port = port
        self._gate = gate
        self._stays = stays

    async def submit(
        self,
        request: Request,
        take_at_once: TakeAtOnce = take_nothing,
        take_tokens: TakeTokens = take_no_tokens,
        open_lane: OpenLane = open_no_lane,  # not used: each token is noted here
    ) -> AsyncGenerator[Update, None]:
        """Starts a request, and pauses it as often as the gate says. Raises VersionLeaves."""
        journal = Journal(_in_background(request))
        ticket = self._gate.ticket(self._port, self._stays)
        has_token = False  # the present part has a token

        def record(token_ids: Sequence[int]) -> None:
            nonlocal has_token
            journal.record(token_ids)
            if token_ids and not has_token:  # its prompt is computed: there is time for another
                has_token = True
                self._gate.admit()

        def noted_at_once(update: Update) -> bool:
            if update.outcome is not None:
                return False
            taken = take_at_once(journal.shown(update))
            if taken:
                record(update.token_ids)
            return taken

        def noted_tokens(token_ids: Sequence[int], now_s: float) -> bool:
            taken = take_tokens(token_ids, now_s)
            if taken:
                record(token_ids)
            return taken

        try:
            while True:
                await ticket.enter()
                has_token = False
                part = journal.next_request()
                ticket.request_id = part.request_id
                updates = self._port.submit(part, noted_at_once, noted_tokens)
                async with aclosing(updates):
                    async for update in updates:
                        shown = journal.shown(update)
                        record(update.token_ids)
                        is_paused = isinstance(update.outcome, Cancelled) and not ticket.is_in
                        if is_paused:
                            shown = replace(shown, outcome=None, timeline=None)
                        if not is_paused or shown.token_ids:
                            yield shown
                        if update.outcome is not None and not is_paused:
                            return
                ticket.request_id = None
        finally:
            self._gate.leave(ticket)


class Journal:
    """One request with its tokens so far."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._num_parts = 0
        self._num_cached: int | None = None  # tokens of the prompt that the first part found cached

    def record(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that were delivered."""
        self._tokens += token_ids

    def shown(self, update: Update) -> Update:
        """The update with the cached tokens of the client's prompt, not of a later part."""
        timeline = update.timeline
        if timeline is None:
            return update
        if self._num_cached is None:
            self._num_cached = timeline.num_cached_tokens
        return replace(update, timeline=_with_cached(timeline, self._num_cached))

    def next_request(self) -> Request:
        """The request for what is left. Each part has an id of its own, as news may come late."""
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


def _with_cached(timeline: Timeline, num_cached_tokens: int) -> Timeline:
    return replace(timeline, num_cached_tokens=num_cached_tokens)


def _in_background(request: Request) -> Request:
    """The request behind all others, and with a turn of its own among batches."""
    return replace(
        request,
        priority=BATCH_PRIORITY,
        tenant=f"batch {request.tenant}",
        has_key=False,
        deadline_s=None,
        tpot_bound_s=None,
        is_background=True,
    )
