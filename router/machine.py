"""The life of a request across the pools, decided without I/O.

    arrived ──> queued ──place──> (offered) ──> prefilling ──PrefillDone──> decoding ──> ended
                  ^                   │             │                          │
                  └───────── worker lost, given back, no news in time ─────────┘

The machine's record of a request (prompt, tokens so far, sampling) is its journal: together they
determine every token to come on whatever worker, so a lost attempt is repeated as a prefill of
prompt and tokens so far, and the client sees a longer gap and nothing else.

Each placement is an *attempt* with its own SeqId; news of an older one match nothing. Within an
attempt on two workers, the decode worker is sent `Decode` as soon as the prefill worker has opened
the lease, and `FirstToken` as soon as the gateway has it, in this order.

Where another worker holds more of the prompt than the one that is to compute it, and to pull that
is predicted to be quicker, the holder is asked to offer it first, and `Prefill` or `Generate` takes
the offered lease along. No offer in time, or none at all, only means that all is computed.

Of a group of requests that share a prompt only the leader is queued. The others are held back until
its prompt is computed and its KV is at its decode worker, or until that will not be; they are then
first in the queue, and go to the same two workers where these have room. From then on each lives,
fails over and ends by itself.

A decode worker that runs out of memory gives its youngest sequence back. That is no failure of the
attempt, if it brought a token at all, and does not count as one. The request is first in the queue
again, and stays there until some worker has room: one that gave it back, when it has reported room
for all of it, or after a back-off that grows.

Every accepted request ends in exactly one of Finished, Rejected, Failed, Cancelled. A placement
reserves, in the same call, what it chose; every end of an attempt gives that back and tells all
workers concerned, whatever the reason.

The machine knows no socket, no clock and no text. Events and time go in, effects come out.
"""

from collections import Counter, deque
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial

from engine.blocks import BlockHash
from engine.config import RouterConfig
from engine.messages import (
    PREEMPTED,
    Cancel,
    Decode,
    DecodeStarted,
    FirstToken,
    Generate,
    GivenBack,
    KvReady,
    LeaseRef,
    LoadReport,
    Logprobs,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Refused,
    RequestId,
    SeqId,
    ToGateway,
    Tokens,
    ToWorker,
    Welcome,
    WorkerId,
)
from router.groups import HeldBack
from router.policy import (
    Busy,
    Impossible,
    Need,
    Placement,
    SharedPrompt,
    decode_blocks,
    least_loaded,
    prefix_source,
)
from router.prefixes import PrefixHashes, PrefixMap, Rates
from router.requests import Cancelled, Failed, Finished, Outcome, Rejected, Request, Timeline
from router.view import ClusterView, WorkerView

SEVERED_S = 10.0  # workers between which KV did not arrive are kept apart for so long
FIRST_BACK_OFF_S = 1.0  # about the time between two load reports
MAX_BACK_OFF_S = 8.0

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
    logprobs: tuple[Logprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[Logprobs, ...] = ()


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
    """One placement. While `offer_due_s` is set, the prefill worker has not heard of it."""

    seq_id: SeqId
    prefill: WorkerId
    decode: WorkerId
    base_len: int  # tokens that it prefills
    holder: WorkerId | None = None  # its offer of a prefix may be open
    offer_due_s: float | None = None  # until then its answer is waited for
    started_s: float | None = None  # the first chunk
    num_cached_tokens: int = 0  # of `base_len`, found cached or pulled
    lease: LeaseRef | None = None
    prefilled: bool = False
    kv_ready: bool = False

    @property
    def hands_over(self) -> bool:
        return self.prefill != self.decode


@dataclass(slots=True)
class _Flight:
    """One accepted request. `attempt` is None while it is queued or held back."""

    request: Request
    stamps: _Stamps
    last_news_s: float
    tokens: list[int] = field(default_factory=list)  # of the answer, all delivered
    attempt: _Attempt | None = None
    num_attempts: int = 0
    num_preemptions: int = 0  # attempts that do not count
    preempted_s: dict[WorkerId, float] = field(default_factory=dict)  # when last, by whom
    back_off_until_s: float | None = None
    leads: bool = True  # followers are held back for it
    shared: SharedPrompt | None = None  # of its leader, or its own when it leads no more
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_transfer_s: float | None = None
    kv_exposed_s: float | None = None
    workers: tuple[str, str] = ("", "")
    kept_tokens: dict[WorkerId, int] = field(default_factory=dict)  # by lost attempts
    hashes: PrefixHashes = field(default_factory=PrefixHashes)

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids, *self.tokens]

    @property
    def length(self) -> int:
        return len(self.request.token_ids) + len(self.tokens)

    @property
    def prompt_logprobs(self) -> int | None:
        """What an attempt is to tell of the prompt: nothing, once the client has been told."""
        return None if self.tokens else self.request.prompt_logprobs

    def leading_hashes(self, num_tokens: int, worker: WorkerView) -> list[BlockHash]:
        block_size = worker.info.layout.block_size
        return self.hashes.leading(self.token_ids, num_tokens=num_tokens, block_size=block_size)


class RouterMachine:
    """All requests of one gateway. Only `handle` changes it."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.view = ClusterView()
        self.prefixes = PrefixMap()
        self._rates = Rates()
        self._flights: dict[RequestId, _Flight] = {}
        self._queue: deque[RequestId] = deque()
        self._held = HeldBack()
        self._by_seq: dict[SeqId, RequestId] = {}
        self.counters: Counter[tuple[str, str]] = Counter()

    @property
    def queue_len(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue) + len(self._held)

    @property
    def num_flights(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    def handle(self, event: RouterEvent, now_s: float) -> list[RouterEffect]:
        """Takes an event in; what follows from it comes out."""
        match event:
            case WorkerJoined(info):
                self.view.workers[info.worker_id] = WorkerView(info)
                self.prefixes.add(info.worker_id, info.num_blocks)
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
        flights = self._flights.values()
        # Those that are held back wait for their leader, which has a deadline.
        deadlines = [self._deadline_s(f) for f in flights if f.request.request_id not in self._held]
        others = [f.attempt.offer_due_s for f in flights if f.attempt is not None]
        if self._queue:  # only its head is waited for
            others.append(self._flights[self._queue[0]].back_off_until_s)
        deadlines += [due_s for due_s in others if due_s is not None]
        return min(deadlines, default=None)

    def validate(self) -> None:
        """Asserts the machine's invariants, reservations included."""
        self.view.validate()
        self.prefixes.validate()
        assert self.prefixes.workers == set(self.view.workers)
        waiting = {i for i, f in self._flights.items() if f.attempt is None}
        held = {i for i in waiting if i in self._held}
        queued = waiting - held
        assert queued == set(self._queue)
        self._validate_groups(held)
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
            if attempt.holder is not None:
                assert attempt.holder in self.view.workers
                assert attempt.holder != attempt.prefill
                assert attempt.started_s is None
            else:
                assert attempt.offer_due_s is None

    def _validate_groups(self, held: Set[RequestId]) -> None:
        self._held.validate()
        assert len(self._held) == len(held)
        for request_id in held:
            leader = self._flights[request_id].request.leader
            assert leader is not None
            assert leader not in self._held
            assert self._flights[leader].leads, "held back for nobody"

    # ------------------------------------------------------------ arrival and placement

    def _on_arrived(self, request: Request, now_s: float) -> list[RouterEffect]:
        flight = _Flight(request, _Stamps(arrived_s=now_s), now_s)
        assert request.request_id not in self._flights
        if self.queue_len >= self._config.max_queue:
            self.counters["rejected", "queue full"] += 1
            message = f"{self.queue_len} requests are waiting already"
            return [End(request.request_id, Rejected(message, 1.0), _timeline(flight, now_s))]
        self._flights[request.request_id] = flight
        leader = None if request.leader is None else self._flights.get(request.leader)
        if leader is not None and leader.leads:
            flight.leads = False
            self._held.hold(request.request_id, leader.request.request_id)
            return []
        flight.shared = None if leader is None else leader.shared
        self._queue.append(request.request_id)
        return []

    def _release_followers(self, leader: _Flight, now_s: float) -> None:
        """Queues those that were held back: there is nothing to wait for any more."""
        leader.leads = False
        leader.shared = self._shared_prompt(leader)
        for request_id in reversed(self._held.release(leader.request.request_id)):
            flight = self._flights[request_id]
            flight.shared, flight.last_news_s = leader.shared, now_s
            self._queue.appendleft(request_id)

    def _shared_prompt(self, leader: _Flight) -> SharedPrompt | None:
        attempt = leader.attempt
        if attempt is None or not attempt.prefilled:
            return None
        worker = self.view.workers.get(attempt.prefill)
        if worker is None:
            return None
        # A worker computes one token at least, or there would be nothing to sample from.
        block_size = worker.info.layout.block_size
        num_tokens = (len(leader.request.token_ids) - 1) // block_size * block_size
        return SharedPrompt(Placement(attempt.prefill, attempt.decode), num_tokens)

    def _place_all(self, now_s: float) -> list[RouterEffect]:
        """Places queued requests in order, as far as there is room."""
        effects: list[RouterEffect] = []
        self.view.forget_severed(now_s)
        while self._queue:
            flight = self._flights[self._queue[0]]
            need = _need(flight, now_s)
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
        flight.back_off_until_s = None
        self._by_seq[seq_id] = request.request_id
        flight.last_news_s = now_s
        if not flight.tokens:
            flight.stamps.placed_s = now_s
        decode_worker = self.view.workers[placement.decode]
        num_to_compute = need.tokens_to_compute(placement.prefill)
        self.view.workers[placement.prefill].reserve_prefill(seq_id, num_to_compute)
        decode_worker.reserve_decode(seq_id, decode_blocks(decode_worker, need))
        return [self._ask_or_prefill(flight, flight.attempt, now_s)]

    def _ask_or_prefill(self, flight: _Flight, attempt: _Attempt, now_s: float) -> SendTo:
        """Asks another worker for the prefix if that pays, else has the prompt computed."""
        holder = self._prefix_source(flight, attempt)
        if holder is None:
            return self._send_prefill(flight, attempt, None, now_s)
        attempt.holder, attempt.offer_due_s = holder, now_s + self._config.offer_timeout_s
        self.counters["prefix offer", "asked"] += 1
        return SendTo(holder, OfferPrefix(attempt.seq_id, flight.token_ids))

    def _prefix_source(self, flight: _Flight, attempt: _Attempt) -> WorkerId | None:
        if len(self.view.workers) < 2 or flight.prompt_logprobs is not None:
            return None  # and nothing is hashed
        sink = self.view.workers[attempt.prefill]
        # One token at least is computed, or there would be nothing to sample from.
        hashes = flight.leading_hashes(attempt.base_len - 1, sink)
        suspects = {source for source, _ in self.view.severed}
        longest = self.prefixes.longest(hashes)
        held_blocks = {i: n for i, n in longest.items() if i not in suspects}
        pays = partial(self._rates.pull_pays, layout=sink.info.layout)
        return prefix_source(self.view, attempt.prefill, held_blocks, pays)

    def _send_prefill(
        self, flight: _Flight, attempt: _Attempt, prefix: LeaseRef | None, now_s: float
    ) -> SendTo:
        request = flight.request
        attempt.offer_due_s = None
        flight.last_news_s = now_s
        kind = Prefill if attempt.hands_over else Generate
        message = kind(
            seq_id=attempt.seq_id,
            token_ids=flight.token_ids,
            sampling=request.sampling,
            limits=request.limits,
            prefix=prefix,
            prompt_logprobs=flight.prompt_logprobs,
        )
        return SendTo(attempt.prefill, message)

    def _compute_all(
        self, flight: _Flight, attempt: _Attempt, reason: str, now_s: float
    ) -> list[RouterEffect]:
        """There is no prefix to wait for."""
        self.counters["fallback", reason] += 1
        attempt.holder = None
        return [self._send_prefill(flight, attempt, None, now_s)]

    # ------------------------------------------------------------ news of workers

    def _on_message(
        self, worker_id: WorkerId, message: ToGateway, now_s: float
    ) -> list[RouterEffect]:
        if isinstance(message, LoadReport):
            if (worker := self.view.workers.get(worker_id)) is not None:
                worker.load, worker.reported_s = message, now_s
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
            case PrefixOffered():
                return self._on_prefix_offered(flight, worker_id, message, now_s)
            case PrefillStarted():
                return self._on_prefill_started(flight, attempt, message, now_s)
            case PrefillDone():
                return self._on_prefill_done(flight, attempt, message, now_s)
            case KvReady():
                self._on_kv_ready(flight, attempt, message, now_s)
                self._release_if_computed(flight, attempt, now_s)
                return []
            case DecodeStarted():
                if len(flight.tokens) == 1:
                    flight.stamps.decode_started_s = now_s
                return []
            case Tokens():
                return self._on_tokens(flight, message, now_s)
            case GivenBack():
                return self._on_given_back(flight, worker_id, message, now_s)

    def _on_given_back(
        self, flight: _Flight, worker_id: WorkerId, message: GivenBack, now_s: float
    ) -> list[RouterEffect]:
        attempt = flight.attempt
        assert attempt is not None
        if message.hopeless:
            return self._end(flight, Failed(message.reason), now_s)
        if message.num_kept_tokens > 0:
            flight.kept_tokens[worker_id] = message.num_kept_tokens
            self._record(flight, worker_id, min(message.num_kept_tokens, attempt.base_len))
        if worker_id == attempt.decode and attempt.hands_over and not attempt.kv_ready:
            self.view.severed[attempt.prefill, attempt.decode] = now_s + SEVERED_S
        if message.reason == PREEMPTED and flight.length > attempt.base_len:
            self._back_off(flight, worker_id, now_s)
        return self._retry(flight, message.reason, now_s)

    def _back_off(self, flight: _Flight, worker_id: WorkerId, now_s: float) -> None:
        """The attempt got somewhere, and only memory was short: it does not count."""
        flight.preempted_s[worker_id] = now_s
        back_off_s = FIRST_BACK_OFF_S * 2**flight.num_preemptions
        flight.back_off_until_s = now_s + min(back_off_s, MAX_BACK_OFF_S)
        flight.num_preemptions += 1

    def _on_prefix_offered(
        self, flight: _Flight, worker_id: WorkerId, message: PrefixOffered, now_s: float
    ) -> list[RouterEffect]:
        attempt = flight.attempt
        assert attempt is not None
        if attempt.offer_due_s is None or attempt.holder != worker_id:
            return []  # too late
        num_held = 0 if message.lease is None else message.lease.num_blocks
        hashes = flight.leading_hashes(attempt.base_len - 1, self.view.workers[worker_id])
        self.prefixes.retract(worker_id, hashes[num_held:])
        if message.lease is None:
            return self._compute_all(flight, attempt, "prefix not held", now_s)
        return [self._send_prefill(flight, attempt, message.lease, now_s)]

    def _on_prefill_started(
        self, flight: _Flight, attempt: _Attempt, message: PrefillStarted, now_s: float
    ) -> list[RouterEffect]:
        if not flight.tokens:
            flight.stamps.prefill_started_s = now_s
            flight.num_cached_tokens = message.num_cached_tokens
        attempt.started_s, attempt.num_cached_tokens = now_s, message.num_cached_tokens
        attempt.holder = None  # a pull of its prefix, and so its lease, is over
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
        if attempt.started_s is not None:
            num_computed_tokens = attempt.base_len - attempt.num_cached_tokens
            self._rates.observe_prefill(num_computed_tokens, now_s - attempt.started_s)
        self._record(flight, attempt.prefill, attempt.base_len)
        self.view.workers[attempt.prefill].release_prefill(attempt.seq_id)
        logprobs = () if message.logprobs is None else (message.logprobs,)
        prompt_logprobs = tuple(message.prompt_logprobs)
        effects: list[RouterEffect] = [
            self._deliver(flight, [message.token], logprobs, now_s, prompt_logprobs=prompt_logprobs)
        ]
        if message.finish is not None:
            return effects + self._end(flight, Finished(message.finish), now_s)
        self._release_if_computed(flight, attempt, now_s)
        if attempt.lease is not None:
            effects.append(SendTo(attempt.decode, FirstToken(attempt.seq_id, message.token)))
        return effects

    def _release_if_computed(self, flight: _Flight, attempt: _Attempt, now_s: float) -> None:
        if flight.leads and attempt.prefilled and attempt.kv_ready:
            self._release_followers(flight, now_s)

    def _on_kv_ready(
        self, flight: _Flight, attempt: _Attempt, message: KvReady, now_s: float
    ) -> None:
        attempt.kv_ready = True
        if len(flight.tokens) <= 1:
            flight.stamps.kv_ready_s = now_s
            flight.kv_transfer_s = message.transfer_s
            flight.kv_exposed_s = message.exposed_s
        block_bytes = self.view.workers[attempt.decode].info.layout.block_bytes
        self._rates.observe_pull(message.num_pulled_blocks * block_bytes, message.transfer_s)
        self._record(flight, attempt.decode, attempt.base_len)

    def _record(self, flight: _Flight, worker_id: WorkerId, num_tokens: int) -> None:
        """A worker holds the KV of so many leading tokens of a request."""
        worker = self.view.workers.get(worker_id)
        if worker is not None and len(self.view.workers) > 1:
            self.prefixes.record(worker_id, flight.leading_hashes(num_tokens, worker))

    def _on_tokens(self, flight: _Flight, message: Tokens, now_s: float) -> list[RouterEffect]:
        flight.num_drafted_tokens += message.num_drafted
        flight.num_accepted_tokens += message.num_accepted
        logprobs = tuple(message.logprobs)
        effects: list[RouterEffect] = [self._deliver(flight, message.token_ids, logprobs, now_s)]
        if message.finish is not None:
            # Both workers are done with it: there is nobody to tell.
            effects += self._end(flight, Finished(message.finish), now_s, tell_workers=False)
        return effects

    def _deliver(
        self,
        flight: _Flight,
        tokens: list[int],
        logprobs: tuple[Logprobs, ...],
        now_s: float,
        *,
        prompt_logprobs: tuple[Logprobs, ...] = (),
    ) -> Deliver:
        num_before = len(flight.tokens)
        flight.tokens += tokens
        timeline = None
        if num_before < 2:
            if num_before == 0:
                flight.stamps.first_token_s = now_s
            if len(flight.tokens) > 1:
                flight.stamps.second_token_s = now_s
            timeline = _timeline(flight, now_s)
        request_id = flight.request.request_id
        return Deliver(request_id, tuple(tokens), timeline, logprobs, prompt_logprobs)

    # ------------------------------------------------------------ ends and new beginnings

    def _on_client_gone(self, request_id: RequestId, now_s: float) -> list[RouterEffect]:
        flight = self._flights.get(request_id)
        return [] if flight is None else self._end(flight, Cancelled(), now_s)

    def _on_worker_lost(self, worker_id: WorkerId, reason: str, now_s: float) -> list[RouterEffect]:
        if self.view.workers.pop(worker_id, None) is None:
            return []
        self.prefixes.forget(worker_id)
        self.counters["worker lost", reason] += 1
        effects: list[RouterEffect] = []
        for flight in self._youngest_first():
            flight.kept_tokens.pop(worker_id, None)
            flight.preempted_s.pop(worker_id, None)
            attempt = flight.attempt
            if attempt is None:
                continue
            needs_prefill = not (attempt.prefilled and attempt.kv_ready)
            if attempt.decode == worker_id or (attempt.prefill == worker_id and needs_prefill):
                effects += self._retry(flight, "worker lost", now_s)
            elif attempt.holder == worker_id:
                effects += self._on_holder_lost(flight, attempt, now_s)
        return effects

    def _on_holder_lost(
        self, flight: _Flight, attempt: _Attempt, now_s: float
    ) -> list[RouterEffect]:
        if attempt.offer_due_s is not None:
            return self._compute_all(flight, attempt, "prefix holder lost", now_s)
        attempt.holder = None  # the prefill worker notices by itself
        return []

    def _youngest_first(self) -> list[_Flight]:
        """In this order those that go back to the head of the queue keep their order there."""
        return list(reversed(self._flights.values()))

    def _retry(self, flight: _Flight, reason: str, now_s: float) -> list[RouterEffect]:
        """Ends the attempt and puts the request first in the queue."""
        self.counters["retried", reason] += 1
        self._release_followers(flight, now_s)
        effects = self._end_attempt(flight)
        if flight.num_attempts - flight.num_preemptions >= self._config.max_attempts:
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
        concerned = [attempt.prefill, attempt.decode]
        if attempt.holder is not None:
            concerned.append(attempt.holder)
        for worker_id in dict.fromkeys(concerned):
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
        attempt = flight.attempt
        self._release_followers(flight, now_s)
        if request_id in self._held:
            self._held.discard(request_id)
        elif attempt is None and request_id in self._queue:
            self._queue.remove(request_id)
        has_kv = attempt is not None and attempt.prefilled and attempt.kv_ready
        if attempt is not None and has_kv and (attempt.lease or not attempt.hands_over):
            # Where a first token was the last nothing was handed over. The last token of any answer
            # was not fed back: its KV is nowhere.
            self._record(flight, attempt.decode, len(flight.token_ids) - 1)
        effects = self._end_attempt(flight, tell_workers=tell_workers)
        del self._flights[request_id]
        self.counters["ended", type(outcome).__name__.lower()] += 1
        return [*effects, End(request_id, outcome, _timeline(flight, now_s))]

    def _on_tick(self, now_s: float) -> list[RouterEffect]:
        effects: list[RouterEffect] = []
        for flight in self._youngest_first():
            if flight.request.request_id in self._held:
                continue
            if self._deadline_s(flight) > now_s:
                effects += self._stop_waiting_for_offer(flight, now_s)
            elif flight.attempt is not None:
                effects += self._retry(flight, "no news in time", now_s)
            elif flight.tokens:
                effects += self._end(flight, Failed("no worker had room in time"), now_s)
            else:
                outcome = Rejected("no worker had room in time", self._config.queue_timeout_s / 2)
                effects += self._end(flight, outcome, now_s)
        return effects

    def _stop_waiting_for_offer(self, flight: _Flight, now_s: float) -> list[RouterEffect]:
        """The holder is told too: should it offer yet, nobody would come."""
        attempt = flight.attempt
        if attempt is None or attempt.offer_due_s is None or attempt.offer_due_s > now_s:
            return []
        assert attempt.holder is not None
        cancel = SendTo(attempt.holder, Cancel(attempt.seq_id))
        return [cancel, *self._compute_all(flight, attempt, "prefix offer late", now_s)]

    def _deadline_s(self, flight: _Flight) -> float:
        if flight.attempt is None:
            return flight.last_news_s + self._config.queue_timeout_s
        timeout_s = self._config.progress_timeout_s
        if not flight.attempt.prefilled:
            timeout_s += flight.attempt.base_len / self._config.slowest_prefill_tokens_per_s
        return flight.last_news_s + timeout_s


def _need(flight: _Flight, now_s: float) -> Need:
    """What the next attempt needs. Only a first one is kept close to the leader's."""
    if flight.back_off_until_s is not None and flight.back_off_until_s <= now_s:
        flight.back_off_until_s = None
    return Need(
        num_tokens=flight.length,
        max_len=flight.request.limits.max_len,
        kept_tokens=flight.kept_tokens,
        shared=flight.shared if flight.num_attempts == 0 else None,
        preempted_s={} if flight.back_off_until_s is None else flight.preempted_s,
    )


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
        kv_transfer_s=flight.kv_transfer_s,
        kv_exposed_s=flight.kv_exposed_s,
        num_cached_tokens=flight.num_cached_tokens,
        num_drafted_tokens=flight.num_drafted_tokens,
        num_accepted_tokens=flight.num_accepted_tokens,
        attempts=flight.num_attempts,
        prefill_worker=flight.workers[0],
        decode_worker=flight.workers[1],
    )


def _between(low_s: float, at_s: float | None, high_s: float) -> float:
    """`at_s`, kept within its neighbours; a stage that was not seen ends where it began."""
    return low_s if at_s is None else min(max(at_s, low_s), high_s)
