"""The life of a request across the pools, decided without I/O.

    arrived ──> queued ──place──> prefilling ──PrefillDone──> decoding ──> ended
                  ^                    │                         │
                  └── worker lost, given back, no news in time ──┘

The machine's record of a request (prompt, tokens so far, sampling) is its journal: together they
determine every token to come on whatever worker, so a lost attempt is repeated as a prefill of
prompt and tokens so far, and the client sees a longer gap and nothing else.

Each placement is an *attempt* with its own SeqId; news of an older one match nothing. Within an
attempt on two workers, the decode worker is sent `Decode` as soon as the prefill worker has opened
the lease, and `FirstToken` as soon as the gateway has it, in this order.

Every accepted request ends in exactly one of Finished, Rejected, Failed, Cancelled. A placement
reserves, in the same call, what it chose; every end of an attempt gives that back and tells both
workers, whatever the reason.

The machine knows no socket, no clock and no text. Events and time go in, effects come out.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from engine.config import RouterConfig
from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FirstToken,
    Generate,
    GivenBack,
    KvReady,
    LeaseRef,
    LoadReport,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Refused,
    RequestId,
    SeqId,
    ToGateway,
    Tokens,
    ToWorker,
    Welcome,
    WorkerId,
)
from router.policy import Busy, Impossible, Need, Placement, decode_blocks, least_loaded
from router.requests import Cancelled, Failed, Finished, Outcome, Rejected, Request, Timeline
from router.view import ClusterView, WorkerView

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


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client's request, validated and tokenised."""

    request: Request


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client left, or a stop string ended the answer."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A worker's message."""

    worker_id: WorkerId
    message: ToGateway


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time."""


RouterEvent = WorkerJoined | WorkerLost | Arrived | ClientGone | FromWorker | Tick

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to a worker."""

    worker_id: WorkerId
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give tokens to the client; with the first two, when stages end, the timeline."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The request is over; nothing of it follows."""

    request_id: RequestId
    outcome: Outcome
    timeline: Timeline


RouterEffect = SendTo | Deliver | End


# ---------------------------------------------------------------- state


@dataclass(slots=True)
class _Stamps:
    """When a request passed each stage of its present attempt, seconds. None until it did."""

    arrived_s: float
    placed_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    decode_started_s: float | None = None
    second_token_s: float | None = None


@dataclass(slots=True)
class _Attempt:
    seq_id: SeqId
    prefill: WorkerId
    decode: WorkerId
    base_len: int  # tokens that it prefills
    lease: LeaseRef | None = None
    prefilled: bool = False
    kv_ready: bool = False

    @property
    def hands_over(self) -> bool:
        return self.prefill != self.decode


@dataclass(slots=True)
class _Flight:
    """One accepted request. `attempt` is None while it is queued."""

    request: Request
    stamps: _Stamps
    last_news_s: float
    tokens: list[int] = field(default_factory=list)  # of the answer, all delivered
    attempt: _Attempt | None = None
    num_attempts: int = 0
    num_cached_tokens: int = 0
    workers: tuple[str, str] = ("", "")

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids, *self.tokens]


class RouterMachine:
    """All requests of one gateway. Only `handle` changes it."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.view = ClusterView()
        self._flights: dict[RequestId, _Flight] = {}
        self._queue: deque[RequestId] = deque()
        self._by_seq: dict[SeqId, RequestId] = {}
        self.counters: Counter[tuple[str, str]] = Counter()

    @property
    def queue_len(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    @property
    def num_flights(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    def handle(self, event: RouterEvent, now_s: float) -> list[RouterEffect]:
        """Takes an event in; what follows from it comes out."""
        match event:
            case WorkerJoined(info):
                self.view.workers[info.worker_id] = WorkerView(info)
                effects: list[RouterEffect] = []
            case WorkerLost(worker_id, reason):
                effects = self._on_worker_lost(worker_id, reason, now_s)
            case Arrived(request):
                effects = self._on_arrived(request, now_s)
            case ClientGone(request_id):
                effects = self._on_client_gone(request_id, now_s)
            case FromWorker(worker_id, message):
                effects = self._on_message(worker_id, message, now_s)
            case Tick():
                effects = self._on_tick(now_s)
        return effects + self._place_all(now_s)

    def next_wake_s(self) -> float | None:
        """When the next deadline falls due."""
        deadlines = [self._deadline_s(flight) for flight in self._flights.values()]
        return min(deadlines, default=None)

    def validate(self) -> None:
        """Asserts the machine's invariants, reservations included."""
        self.view.validate()
        queued = {i for i, f in self._flights.items() if f.attempt is None}
        assert queued == set(self._queue)
        assert len(self._queue) == len(queued)
        attempts = {f.attempt.seq_id: f.attempt for f in self._flights.values() if f.attempt}
        assert set(attempts) == set(self._by_seq)
        for worker_id, worker in self.view.workers.items():
            prefills = {
                i for i, a in attempts.items() if a.prefill == worker_id and not a.prefilled
            }
            decodes = {i for i, a in attempts.items() if a.decode == worker_id}
            assert set(worker.prefill_tokens) == prefills
            assert set(worker.decode_blocks) == decodes
        for attempt in attempts.values():
            assert attempt.decode in self.view.workers
            done_with_prefill = attempt.prefilled and attempt.kv_ready
            assert done_with_prefill or attempt.prefill in self.view.workers

    # ------------------------------------------------------------ arrival and placement

    def _on_arrived(self, request: Request, now_s: float) -> list[RouterEffect]:
        flight = _Flight(request, _Stamps(arrived_s=now_s), now_s)
        assert request.request_id not in self._flights
        if len(self._queue) >= self._config.max_queue:
            self.counters["rejected", "queue full"] += 1
            message = f"{len(self._queue)} requests are waiting already"
            return [End(request.request_id, Rejected(message, 1.0), _timeline(flight, now_s))]
        self._flights[request.request_id] = flight
        self._queue.append(request.request_id)
        return []

    def _place_all(self, now_s: float) -> list[RouterEffect]:
        """Places queued requests in order, as far as there is room."""
        effects: list[RouterEffect] = []
        while self._queue:
            flight = self._flights[self._queue[0]]
            request = flight.request
            base_len = len(request.token_ids) + len(flight.tokens)
            max_len = request.limits.max_len
            need = Need(base_len, max_len)
            choice = least_loaded(self.view, need, self._config.prefill_backlog_tokens)
            match choice:
                case Busy():
                    break
                case Impossible(reason):
                    effects += self._end(flight, Failed(reason), now_s)
                case Placement():
                    self._queue.popleft()
                    effects += self._place(flight, choice, need, now_s)
        return effects

    def _place(
        self, flight: _Flight, placement: Placement, need: Need, now_s: float
    ) -> list[RouterEffect]:
        request = flight.request
        seq_id = SeqId(f"{request.request_id}.{flight.num_attempts}")
        flight.num_attempts += 1
        flight.attempt = _Attempt(seq_id, placement.prefill, placement.decode, need.num_tokens)
        flight.workers = (placement.prefill, placement.decode)
        self._by_seq[seq_id] = request.request_id
        flight.last_news_s = now_s
        if not flight.tokens:
            flight.stamps.placed_s = now_s
        decode_worker = self.view.workers[placement.decode]
        self.view.workers[placement.prefill].reserve_prefill(seq_id, need.num_tokens)
        decode_worker.reserve_decode(seq_id, decode_blocks(decode_worker, need))
        kind = Prefill if flight.attempt.hands_over else Generate
        message = kind(seq_id, flight.token_ids, request.sampling, request.limits)
        return [SendTo(placement.prefill, message)]

    # ------------------------------------------------------------ news of workers

    def _on_message(
        self, worker_id: WorkerId, message: ToGateway, now_s: float
    ) -> list[RouterEffect]:
        if isinstance(message, LoadReport):
            if (worker := self.view.workers.get(worker_id)) is not None:
                worker.load = message
            return []
        if isinstance(message, Welcome | Refused):
            return []  # the link deals with these
        request_id = self._by_seq.get(message.seq_id)
        if request_id is None:
            return []  # of an attempt that is over
        flight = self._flights[request_id]
        attempt = flight.attempt
        assert attempt is not None
        flight.last_news_s = now_s
        match message:
            case PrefillStarted():
                return self._on_prefill_started(flight, attempt, message, now_s)
            case PrefillDone():
                return self._on_prefill_done(flight, attempt, message, now_s)
            case KvReady():
                attempt.kv_ready = True
                if len(flight.tokens) <= 1:
                    flight.stamps.kv_ready_s = now_s
                return []
            case DecodeStarted():
                if len(flight.tokens) == 1:
                    flight.stamps.decode_started_s = now_s
                return []
            case Tokens():
                return self._on_tokens(flight, message, now_s)
            case GivenBack(reason=reason):
                return self._retry(flight, reason, now_s)

    def _on_prefill_started(
        self, flight: _Flight, attempt: _Attempt, message: PrefillStarted, now_s: float
    ) -> list[RouterEffect]:
        if not flight.tokens:
            flight.stamps.prefill_started_s = now_s
            flight.num_cached_tokens = message.num_cached_tokens
        if message.lease is None:
            attempt.kv_ready = True  # nothing will be pulled
            return []
        attempt.lease = message.lease
        request = flight.request
        decode = Decode(
            attempt.seq_id, flight.token_ids, request.sampling, request.limits, message.lease
        )
        return [SendTo(attempt.decode, decode)]

    def _on_prefill_done(
        self, flight: _Flight, attempt: _Attempt, message: PrefillDone, now_s: float
    ) -> list[RouterEffect]:
        attempt.prefilled = True
        self.view.workers[attempt.prefill].release_prefill(attempt.seq_id)
        effects = self._deliver(flight, [message.token], now_s)
        if message.finish is not None:
            return effects + self._end(flight, Finished(message.finish), now_s)
        if attempt.lease is not None:
            effects.append(SendTo(attempt.decode, FirstToken(attempt.seq_id, message.token)))
        return effects

    def _on_tokens(self, flight: _Flight, message: Tokens, now_s: float) -> list[RouterEffect]:
        effects = self._deliver(flight, message.token_ids, now_s)
        if message.finish is not None:
            # Both workers are done with it: there is nobody to tell.
            effects += self._end(flight, Finished(message.finish), now_s, tell_workers=False)
        return effects

    def _deliver(self, flight: _Flight, tokens: list[int], now_s: float) -> list[RouterEffect]:
        if not flight.tokens:
            flight.stamps.first_token_s = now_s
        elif len(flight.tokens) == 1:
            flight.stamps.second_token_s = now_s
        timeline = _timeline(flight, now_s) if len(flight.tokens) < 2 else None
        flight.tokens += tokens
        return [Deliver(flight.request.request_id, tuple(tokens), timeline)]

    # ------------------------------------------------------------ ends and new beginnings

    def _on_client_gone(self, request_id: RequestId, now_s: float) -> list[RouterEffect]:
        flight = self._flights.get(request_id)
        return [] if flight is None else self._end(flight, Cancelled(), now_s)

    def _on_worker_lost(self, worker_id: WorkerId, reason: str, now_s: float) -> list[RouterEffect]:
        if self.view.workers.pop(worker_id, None) is None:
            return []
        self.counters["worker lost", reason] += 1
        effects: list[RouterEffect] = []
        for flight in self._youngest_first():
            attempt = flight.attempt
            if attempt is None:
                continue
            needs_prefill = not (attempt.prefilled and attempt.kv_ready)
            if attempt.decode == worker_id or (attempt.prefill == worker_id and needs_prefill):
                effects += self._retry(flight, "worker lost", now_s)
        return effects

    def _youngest_first(self) -> list[_Flight]:
        """In this order those that go back to the head of the queue keep their order there."""
        return list(reversed(self._flights.values()))

    def _retry(self, flight: _Flight, reason: str, now_s: float) -> list[RouterEffect]:
        """Ends the attempt and puts the request first in the queue."""
        self.counters["retried", reason] += 1
        effects = self._end_attempt(flight)
        if flight.num_attempts >= self._config.max_attempts:
            message = f"given up after {flight.num_attempts} attempts; the last one: {reason}"
            return effects + self._end(flight, Failed(message), now_s)
        flight.last_news_s = now_s
        self._queue.appendleft(flight.request.request_id)
        return effects

    def _end_attempt(self, flight: _Flight, *, tell_workers: bool = True) -> list[RouterEffect]:
        attempt = flight.attempt
        if attempt is None:
            return []
        flight.attempt = None
        del self._by_seq[attempt.seq_id]
        effects: list[RouterEffect] = []
        for worker_id in dict.fromkeys((attempt.prefill, attempt.decode)):
            worker = self.view.workers.get(worker_id)
            if worker is None:
                continue
            worker.release_prefill(attempt.seq_id)
            worker.release_decode(attempt.seq_id)
            if tell_workers:
                effects.append(SendTo(worker_id, Cancel(attempt.seq_id)))
        return effects

    def _end(
        self, flight: _Flight, outcome: Outcome, now_s: float, *, tell_workers: bool = True
    ) -> list[RouterEffect]:
        request_id = flight.request.request_id
        if flight.attempt is None and request_id in self._queue:
            self._queue.remove(request_id)
        effects = self._end_attempt(flight, tell_workers=tell_workers)
        del self._flights[request_id]
        self.counters["ended", type(outcome).__name__.lower()] += 1
        return [*effects, End(request_id, outcome, _timeline(flight, now_s))]

    def _on_tick(self, now_s: float) -> list[RouterEffect]:
        effects: list[RouterEffect] = []
        for flight in self._youngest_first():
            if self._deadline_s(flight) > now_s:
                continue
            if flight.attempt is not None:
                effects += self._retry(flight, "no news in time", now_s)
            elif flight.tokens:
                effects += self._end(flight, Failed("no worker had room in time"), now_s)
            else:
                outcome = Rejected("no worker had room in time", self._config.queue_timeout_s / 2)
                effects += self._end(flight, outcome, now_s)
        return effects

    def _deadline_s(self, flight: _Flight) -> float:
        if flight.attempt is None:
            return flight.last_news_s + self._config.queue_timeout_s
        timeout_s = self._config.progress_timeout_s
        if not flight.attempt.prefilled:
            timeout_s += flight.attempt.base_len / self._config.slowest_prefill_tokens_per_s
        return flight.last_news_s + timeout_s


def _timeline(flight: _Flight, now_s: float) -> Timeline:
    """The stages; one that a lost attempt or an early end left out counts as zero."""
    stamps = flight.stamps
    placed_s = stamps.placed_s if stamps.placed_s is not None else now_s
    first_s = stamps.first_token_s if stamps.first_token_s is not None else max(placed_s, now_s)
    started_s = _between(placed_s, stamps.prefill_started_s, first_s)
    kv_wait_s = decode_queue_s = first_step_s = None
    if stamps.second_token_s is not None:
        kv_ready_s = _between(first_s, stamps.kv_ready_s, stamps.second_token_s)
        decode_s = _between(kv_ready_s, stamps.decode_started_s, stamps.second_token_s)
        kv_wait_s, decode_queue_s = kv_ready_s - first_s, decode_s - kv_ready_s
        first_step_s = stamps.second_token_s - decode_s
    return Timeline(
        route_s=stamps.arrived_s - flight.request.received_s,
        queue_s=placed_s - stamps.arrived_s,
        prefill_queue_s=started_s - placed_s,
        prefill_compute_s=first_s - started_s,
        kv_wait_s=kv_wait_s,
        decode_queue_s=decode_queue_s,
        first_step_s=first_step_s,
        num_cached_tokens=flight.num_cached_tokens,
        attempts=flight.num_attempts,
        prefill_worker=flight.workers[0],
        decode_worker=flight.workers[1],
    )


def _between(low_s: float, at_s: float | None, high_s: float) -> float:
    """`at_s`, kept within its neighbours; a stage that was not seen ends where it began."""
    return low_s if at_s is None else min(max(at_s, low_s), high_s)
