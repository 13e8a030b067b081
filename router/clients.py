"""The running requests of one router, and the sinks that receive their answers."""

import asyncio
from collections.abc import Callable, Iterable
from contextvars import Context

from engine.messages import RequestId, SeqId
from router.machine.events import Arrived, ClientGone
from router.machine.requests import Failed, Request, Update
from router.machine.state import RouterState
from router.port import FrameTaker, Handle, Sink


class RouterClients:
    """All running requests of a router, with their sinks."""

    def __init__(self, state: RouterState, handle: Callable[..., None]) -> None:
        """`handle` passes events to the machine."""
        self.taker: FrameTaker | None = None  # None until an answer offers frames
        self.state = state
        self._handle = handle
        self._clients: dict[RequestId, _Client] = {}
        self._arrived: dict[RequestId, Request] = {}  # requests of this iteration of the loop
        self._num_left_seqs = 0  # `state.num_left_seqs` at the last check
        self._end: Failed | None = None  # set by `cut`: the outcome of all requests

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Starts a request; its answer goes to `sink`."""
        client = _Client(self, request.request_id, sink)
        if self._end is not None:
            client.receive(Update(outcome=self._end), 0.0)
            return client
        self._clients[request.request_id] = client
        self._arrived[request.request_id] = request
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self.admit, context=Context())
        return client

    def admit(self) -> None:
        """Passes all requests of one iteration of the loop to the machine, to place together."""
        requests, self._arrived = list(self._arrived.values()), {}
        if not requests:  # all these requests were cancelled before
            return
        *others, last = requests
        try:
            self._handle(*(Arrived(each, more_come=True) for each in others), Arrived(last))
        except Exception as error:  # a bug; it must end no other requests than these
            for request in requests:
                if (client := self._clients.get(request.request_id)) is not None:
                    client.sink.fail(error)

    def withdraw(self, request_ids: Iterable[RequestId]) -> None:
        """Cancels requests before it returns. Each request gets a last update with that outcome."""
        self.admit()
        self._handle(*(ClientGone(request_id) for request_id in request_ids))

    def leave(self, request_id: RequestId) -> None:
        """Cancels a request without a last update to its sink."""
        self._clients.pop(request_id, None)
        self._arrived.pop(request_id, None)
        if request_id in self.state.flights:
            self._handle(ClientGone(request_id))

    def cut(self, end: Failed) -> int:
        """Ends all requests with this outcome. Later requests end with it at once.

        Returns the number of requests that were running.
        """
        self._end = end
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.receive(Update(outcome=end), 0.0)
        return len(clients)

    def close(self) -> None:
        """Cancels all requests."""
        self.withdraw(list(self._clients))

    def deliver(self, updates: Iterable[Update], now_s: float) -> None:
        """Passes the machine's updates to the sinks of their requests."""
        for update in updates:
            client = self._clients.get(update.request_id)
            if client is None:
                continue
            if update.outcome is not None:
                del self._clients[update.request_id]
            client.receive(update, now_s)

    def close_left(self) -> None:
        """Stops reading frames for sequences whose attempts ended before their requests."""
        state = self.state
        if self.taker is None or state.num_left_seqs == self._num_left_seqs:
            return
        self._num_left_seqs = state.num_left_seqs
        for client in self._clients.values():
            if client.seq_id is not None and client.seq_id not in state.by_seq:
                self.taker.close(client.seq_id)
                client.seq_id = None


class _Client:
    """One request with its sink. Implements `router.port.Handle`."""

    __slots__ = ("_clients", "request_id", "seq_id", "sink")

    def __init__(self, clients: RouterClients, request_id: RequestId, sink: Sink) -> None:
        self._clients = clients
        self.request_id = request_id
        self.sink = sink
        self.seq_id: SeqId | None = None  # the sequence whose tokens may be read from frames

    def receive(self, update: Update, now_s: float) -> None:
        """Passes an update to the sink. A bug of the sink must not end other requests.

        An update with only tokens is passed to `sink.tokens`.
        """
        try:
            if update.outcome is None and update.timeline is None and not update.logprobs:
                self.sink.tokens(update.token_ids, now_s)
            else:
                self.sink.update(update)
        except Exception as error:
            self.sink.fail(error)

    def cancel(self) -> None:
        """Cancels the request. Its sink receives nothing more."""
        self._clients.leave(self.request_id)

    def offer_frames(self, taker: FrameTaker) -> SeqId | None:
        """Offers frames to `taker` from now on. Returns the running sequence; None without any."""
        flight = self._clients.state.flights.get(self.request_id)
        if flight is None or flight.attempt is None:
            return None
        self._clients.taker = taker
        self.seq_id = flight.attempt.seq_id
        return self.seq_id
