"""Requests that wait for a worker, in the order of placement.

Returned requests come first: they had a worker, or were held back for a leader that had a worker.
Then the lowest priority number comes first: no request is placed while one with a lower number
waits. Within a priority, tenants are served in turn by deficit round robin: in each turn, a tenant
may place a quantum of work. The unused part of a quantum is kept while the tenant has requests. So
a tenant that sends more or longer requests waits longer, and other tenants do not.

Within a tenant, the request with the least *rank* comes first. The rank is the time of arrival,
plus `router.queue_patience` times the predicted seconds of the prompt. So a short prompt passes a
long prompt that arrived a little earlier. No prompt starves: a prompt that takes `c` seconds is
passed only by requests that arrive within `patience · c` seconds after it. With a patience of zero,
the order is the order of arrival.

The caller predicts the work of a request, in any unit. `quantum` is the work of one turn.

Several answers to one prompt are a *group*: a leader and its followers. Followers wait outside of
the queue until the leader's prompt is computed and its KV is at its decode worker. On this worker,
the followers share all full blocks of the prompt. Only the last block of a prompt, if it is not
full, is computed for each answer. This is copy-on-write in units of blocks: full blocks are never
written.

Source: Shreedhar and Varghese, Efficient fair queuing using deficit round robin, SIGCOMM 1995.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from engine.messages import RequestId
from router.cluster.estimates import Estimates
from router.cluster.learning import AnswerLengths
from router.machine.flight import Flight

# Quantum of a tenant's turn, in tokens of prompts and predicted answers. With a larger quantum, a
# long request needs fewer turns; with a smaller one, sharing is finer.
QUANTUM_TOKENS = 4096.0
UNIT_TOKENS = 1024  # prompt length whose predicted time is the measure of prefill speed
CHANGED = 1.25  # all requests are ranked again if that time changes by this factor
SPARE = 64  # number of outdated entries allowed in a heap before it is rebuilt


@dataclass(slots=True)
class _Waiter:
    """A request's work, and its rank among the requests of its tenant."""

    work: float
    rank: tuple[float, int]  # the second number is the order of arrival, which breaks ties


@dataclass(slots=True)
class _Tenant:
    """A tenant's requests in order of arrival, and the work it may still place in this turn."""

    waiting: OrderedDict[RequestId, _Waiter] = field(default_factory=OrderedDict)
    ranked: list[tuple[tuple[float, int], RequestId]] = field(default_factory=list)  # a heap
    deficit: float = 0.0

    def rank(self, request_id: RequestId, waiter: _Waiter) -> None:
        """Adds a request, or changes the rank of a request."""
        self.waiting[request_id] = waiter
        heappush(self.ranked, (waiter.rank, request_id))
        if len(self.ranked) > 2 * len(self.waiting) + SPARE:
            self.ranked = [(each.rank, i) for i, each in self.waiting.items()]
            heapify(self.ranked)

    def first(self) -> RequestId:
        """Returns the tenant's request with the least rank."""
        while True:
            rank, request_id = self.ranked[0]
            waiter = self.waiting.get(request_id)
            if waiter is not None and waiter.rank == rank:
                return request_id
            heappop(self.ranked)


@dataclass(slots=True)
class _Level:
    """The tenants that have requests of one priority, in the order of their turns."""

    tenants: OrderedDict[str, _Tenant] = field(default_factory=OrderedDict)
    has_begun: bool = False  # the first tenant has received its quantum


class FairQueue:
    """The queue of requests, fair among tenants."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._returned: OrderedDict[RequestId, None] = OrderedDict()
        self._levels: dict[int, _Level] = {}
        # Priority and tenant of each request, except returned ones.
        self._homes: dict[RequestId, tuple[int, str]] = {}
        self._num_put = 0
        self.size = 0  # number of requests; not a property, as each event reads it

    def __len__(self) -> int:
        return self.size

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._homes or request_id in self._returned

    def __iter__(self) -> Iterator[RequestId]:
        yield from self._returned
        yield from self._homes

    def put(
        self,
        request_id: RequestId,
        *,
        priority: int,
        tenant: str,
        work: float,
        rank: float = 0.0,
    ) -> None:
        """Adds a request. A tenant's request with the least rank is placed first."""
        assert request_id not in self
        level = self._levels.setdefault(priority, _Level())
        waiter = _Waiter(work, (rank, self._num_put))
        self._num_put += 1
        self.size += 1
        level.tenants.setdefault(tenant, _Tenant()).rank(request_id, waiter)
        self._homes[request_id] = (priority, tenant)

    def rank(self, request_id: RequestId, rank: float) -> None:
        """Changes the rank of a request, unless the request was returned."""
        if request_id not in self._homes:
            return
        priority, name = self._homes[request_id]
        tenant = self._levels[priority].tenants[name]
        waiter = tenant.waiting[request_id]
        waiter.rank = (rank, waiter.rank[1])
        tenant.rank(request_id, waiter)

    def put_back(self, request_id: RequestId) -> None:
        """Puts a returned request before all others."""
        assert request_id not in self
        self._returned[request_id] = None
        self.size += 1
        self._returned.move_to_end(request_id, last=False)

    def head(self) -> RequestId | None:
        """Returns the next request to place.

        The next request stays the same until it is removed, or another request is put before it.
        """
        if self._returned:
            return next(iter(self._returned))
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        while True:
            name, tenant = next(iter(level.tenants.items()))
            if not level.has_begun:
                level.has_begun = True
                tenant.deficit += self._quantum
            request_id = tenant.first()
            if tenant.waiting[request_id].work <= tenant.deficit or len(level.tenants) == 1:
                return request_id
            level.tenants.move_to_end(name)
            level.has_begun = False

    def firsts(self) -> Iterator[RequestId]:
        """Yields the head of the queue, and each tenant's first request in the first priority."""
        if self._returned:
            yield next(iter(self._returned))
        if self._levels:
            for tenant in self._levels[min(self._levels)].tenants.values():
                yield tenant.first()

    def num_of(self, tenant: str) -> int:
        """Counts a tenant's requests. Returned requests do not count."""
        levels = self._levels.values()
        return sum(
            len(level.tenants[tenant].waiting) for level in levels if tenant in level.tenants
        )

    def longest(self) -> tuple[str, RequestId | None]:
        """Returns the tenant with most queued requests, and the latest of these requests."""
        names = {name for level in self._levels.values() for name in level.tenants}
        if not names:
            return "", None
        longest = max(sorted(names), key=self.num_of)
        last = max(number for number, level in self._levels.items() if longest in level.tenants)
        return longest, next(reversed(self._levels[last].tenants[longest].waiting))

    def remove(self, request_id: RequestId) -> None:
        """Removes a placed request, and subtracts its work from the quantum of its tenant."""
        self._pop(request_id, is_placed=True)

    def discard(self, request_id: RequestId) -> None:
        """Removes a request that was not placed."""
        self._pop(request_id, is_placed=False)

    def _pop(self, request_id: RequestId, *, is_placed: bool) -> None:
        if request_id in self._returned:
            del self._returned[request_id]
            self.size -= 1
            return
        priority, name = self._homes.pop(request_id)
        self.size -= 1
        level = self._levels[priority]
        tenant = level.tenants[name]
        work = tenant.waiting.pop(request_id).work
        if is_placed:
            tenant.deficit = max(tenant.deficit - work, 0.0)
        if not tenant.waiting:
            if name == next(iter(level.tenants)):
                level.has_begun = False
            del level.tenants[name]
        if not level.tenants:
            del self._levels[priority]

    def validate(self) -> None:
        """Asserts that each request waits at one position, and that each tenant has requests."""
        assert not set(self._homes) & set(self._returned)
        assert self.size == len(self._homes) + len(self._returned)
        seen: dict[RequestId, tuple[int, str]] = {}
        for priority, level in self._levels.items():
            assert level.tenants
            for name, tenant in level.tenants.items():
                assert tenant.waiting
                assert tenant.deficit >= 0
                assert set(tenant.ranked) >= {(w.rank, i) for i, w in tenant.waiting.items()}
                seen |= dict.fromkeys(tenant.waiting, (priority, name))
        assert seen == self._homes


class Waiting:
    """All requests that wait for a worker: those in the queue, and followers held back."""

    def __init__(
        self,
        estimates: Estimates,
        lengths: AnswerLengths,
        watch: Callable[[Flight], None],
        *,
        patience: float = 0.0,
    ) -> None:
        """Creates an empty queue. `watch` records the deadline of a request.

        `patience`: how many seconds of waiting weigh as much as one second of prefill in a rank.
        """
        self.queue = FairQueue(QUANTUM_TOKENS)
        self.num_held = 0  # number of followers that are held back
        self.queued_s = 0.0  # predicted seconds to compute the prompts in the queue
        self._estimates = estimates
        self._lengths = lengths
        self._watch = watch
        self._patience = patience
        # Time of arrival and seconds of prefill of each request.
        self._asks: dict[RequestId, tuple[float, float]] = {}
        self._unit_s = 0.0  # predicted seconds of UNIT_TOKENS at the last ranking

    @property
    def num_requests(self) -> int:
        """The number of requests that wait for a worker."""
        return self.queue.size + self.num_held

    def put(self, flight: Flight) -> None:
        """Queues a new request, ranked as if none of its blocks were cached."""
        self._start_wait(flight)
        self._follow_speed()
        request = flight.request
        self.queue.put(
            request.request_id,
            priority=request.priority,
            tenant=request.tenant,
            work=flight.length + self._lengths.mean(flight.max_tokens),
            rank=self._rank(flight, flight.waits_for_s),
        )

    def _follow_speed(self) -> None:
        """Ranks all requests again if the predicted time of prompts has changed.

        Otherwise new requests with shorter predictions would pass the older requests for too long.
        """
        unit_s = self._estimates.any_prefill_s(UNIT_TOKENS) or 0.0
        if self._unit_s == 0.0:
            self._unit_s = unit_s
            return
        change = unit_s / self._unit_s
        if 1 / CHANGED < change < CHANGED:
            return
        self._unit_s = unit_s
        for request_id, (arrived_s, compute_s) in self._asks.items():
            self._asks[request_id] = arrived_s, compute_s * change
            self.queue.rank(request_id, arrived_s + self._patience * compute_s * change)

    def rank(self, flight: Flight, compute_s: float) -> None:
        """Ranks a queued request by its predicted seconds of prefill."""
        self.queue.rank(flight.request.request_id, self._rank(flight, compute_s))

    def _rank(self, flight: Flight, compute_s: float) -> float:
        self._asks[flight.request.request_id] = flight.stamps.arrived_s, compute_s
        return flight.stamps.arrived_s + self._patience * compute_s

    def hold(self, flight: Flight, leader: Flight) -> None:
        """Holds a follower back until its leader's prompt is computed."""
        flight.leads = False
        flight.held_by = leader
        leader.followers.append(flight)
        self.num_held += 1

    def release(self, leader: Flight) -> None:
        """Puts the followers of a leader at the head of the queue, in order of arrival."""
        followers, leader.followers = leader.followers, []
        self.num_held -= len(followers)
        for flight in reversed(followers):
            flight.held_by = None
            self.put_back(flight)

    def put_back(self, flight: Flight) -> None:
        """Puts a returned request at the head of the queue."""
        self._start_wait(flight)
        self.queue.put_back(flight.request.request_id)

    def pop(self, flight: Flight) -> None:
        """Removes a request from the queue, because the request is being placed."""
        self.queue.remove(flight.request.request_id)
        self._end_wait(flight)

    def drop(self, flight: Flight) -> None:
        """Removes a request that has ended, if it still waits."""
        request_id = flight.request.request_id
        if flight.held_by is not None:
            flight.held_by.followers.remove(flight)
            flight.held_by = None
            self.num_held -= 1
        elif request_id in self.queue:
            self.queue.discard(request_id)
            self._end_wait(flight)

    def _start_wait(self, flight: Flight) -> None:
        """Starts the wait of a request. No token counts as cached until the prefix is looked up."""
        flight.waits_for_s = self._estimates.any_prefill_s(flight.length) or 0.0
        self.queued_s += flight.waits_for_s
        self._watch(flight)

    def _end_wait(self, flight: Flight) -> None:
        self._asks.pop(flight.request.request_id, None)
        self.queued_s = self.queued_s - flight.waits_for_s if self.queue else 0.0

    def validate(self, flights: Mapping[RequestId, Flight]) -> None:
        """Asserts that each request without an attempt waits at one position."""
        self.queue.validate()
        waiting = {i for i, flight in flights.items() if flight.attempt is None}
        held = {i for i in waiting if flights[i].held_by is not None}
        assert self._asks.keys() <= waiting
        assert self.num_held == len(held)
        assert waiting - held == set(self.queue)
        assert abs(self.queued_s - sum(flights[i].waits_for_s for i in self.queue)) < 1e-6
        for flight in (flights[request_id] for request_id in held):
            leader = flight.held_by
            assert leader is not None
            assert flight.request.leader == leader.request.request_id
            assert flight in leader.followers
            assert leader.held_by is None
            assert leader.leads, "held back without a leader"
