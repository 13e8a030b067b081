"""One gateway's demand on the workers, for the planner of pools.

A request is counted when it arrives, even if it is refused. It is counted with the predictions of
that time: the seconds to compute its prompt without the cached part, and the tokens of its answer.
Prompts that a decode worker computed locally are subtracted again.

A request that waits for a decode worker does not wait for a prefill worker. So the queue counts
towards the pool for which its head waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.demand import Observation
from engine.messages import Role, WorkerId
from router.cluster.view import ClusterView
from router.machine.flight import Flight
from router.machine.placing import KnownPrefixes, Placing, likely_bid
from router.machine.state import RouterState
from router.planning.planner import FlipCandidate

LOOK_AFTER_S = 0.9  # a caller that asks once a second gets new data each time

_AS_THEY_ARE: Mapping[WorkerId, Role] = {}


def members(
    view: ClusterView, roles: Mapping[WorkerId, Role] = _AS_THEY_ARE
) -> list[FlipCandidate]:
    """Returns all workers without stores, with the tokens that a flip would move or give back.

    `roles` has the new roles of workers that were told to change.
    """
    return [
        FlipCandidate(
            worker_id,
            roles.get(worker_id, worker.info.role),
            worker.context_tokens + worker.reserved_tokens,
        )
        for worker_id, worker in view.workers.items()
        if not worker.is_store
    ]


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums since the first observation."""

    num_requests: int = 0
    prefill_s: float = 0.0
    output_tokens: float = 0.0
    locally_s: float = 0.0  # the part of `prefill_s` computed by decode workers

    @property
    def sent_s(self) -> float:
        """Seconds of work that prefill workers had to do."""
        return self.prefill_s - self.locally_s


class Demand:
    """Adds up the requests that arrive at a router's state."""

    def __init__(self, state: RouterState, placing: Placing) -> None:
        self._state = state
        self._placing = placing
        self._sums = Sums()
        self._taken = Sums()  # totals at the last observation
        self._taken_s: float | None = None
        self.is_observed = False  # most gateways have no planner

    def arrived(self, flight: Flight, now_s: float) -> None:
        """Counts a new request, whatever its outcome. Call it only while `is_observed`."""
        state, sums = self._state, self._sums
        flight.compute_s = self._prefill_s(flight, now_s)
        self._sums = Sums(
            sums.num_requests + 1,
            sums.prefill_s + flight.compute_s,
            sums.output_tokens + state.lengths.mean(flight.max_tokens),
        )

    def _prefill_s(self, flight: Flight, now_s: float) -> float:
        """Returns the predicted seconds of a prompt; 0 if unknown, or if a leader computes it."""
        state = self._state
        workers = [item for item in state.view.workers.items() if not item[1].is_store]
        if flight.request.leader is not None or not workers:
            return 0.0
        sink = next((item for item in workers if item[1].info.role.prefills), workers[0])
        known = KnownPrefixes(state, flight)
        cached = max(known.matched_tokens().values(), default=0)
        source = likely_bid(state, flight, known, sink, now_s).source
        worker, cached = sink[1], cached if source is None else source.num_tokens
        return state.estimates.prefill_s(worker, flight.length, cached) or 0.0

    def rest(self) -> None:
        """Stops summing until the next observation."""
        self._taken_s, self.is_observed = None, False

    def observe(self, now_s: float) -> Observation:
        """Returns the demand since the last call, and the present state."""
        state, before = self._state, self._taken
        sums = replace(self._sums, locally_s=self._placing.locally_s)
        queued = [state.flights[request_id] for request_id in state.waiting.queue]
        if self._taken_s is None:
            for one in queued:  # they arrived while no planner observed
                one.compute_s = self._prefill_s(one, now_s)
        over_s = now_s - self._taken_s if self._taken_s is not None else 0.0
        self._taken, self._taken_s, self.is_observed = sums, now_s, True
        per_s = 1 / over_s if over_s > 0 else 0.0
        workers = state.view.workers.values()
        prefillers = [worker for worker in workers if worker.info.role.prefills]
        decoders = [worker for worker in workers if worker.decodes]
        costs = [state.estimates.decode_cost(w) for w in workers if w.info.role.decodes]
        busy = self._placing.busy
        waits_for_prefill = busy is not None and busy.lacks is Role.PREFILL
        return Observation(
            requests_per_s=(sums.num_requests - before.num_requests) * per_s,
            prefill_s_per_s=max(sums.sent_s - before.sent_s, 0.0) * per_s,
            output_tokens_per_s=(sums.output_tokens - before.output_tokens) * per_s,
            queued_s=sum(one.compute_s for one in queued) if waits_for_prefill else 0.0,
            prefilling_s=sum(w.ready_s(now_s) for w in prefillers if w.prefills),
            num_queued=0 if waits_for_prefill else len(queued),
            queued_tokens=0 if waits_for_prefill else sum(one.length for one in queued),
            num_decoding=sum(len(worker.decodes) for worker in decoders),
            context_tokens=sum(
                (w.context_tokens + w.reserved_blocks * w.info.layout.block_size) // 2
                for w in decoders
            ),
            reserved_tokens=sum(w.reserved_blocks * w.info.layout.block_size for w in decoders),
            decode_cost=next((cost for cost in costs if cost is not None), None),
        )


class Observer:
    """Observes about once a second, however many callers ask: observing resets the sums."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._looked_s: float | None = None
        self._latest: Observation | None = None

    def latest(self, now_s: float) -> Observation | None:
        """Returns the last observation. None before the end of the first second."""
        if self._looked_s is None:
            self._demand.observe(now_s)
            self._looked_s = now_s
        elif now_s - self._looked_s >= LOOK_AFTER_S:
            self._latest = self._demand.observe(now_s)
            self._looked_s = now_s
        return self._latest

    def rest(self) -> None:
        """Stops summing, as no planner asks."""
        self._demand.rest()
        self._looked_s = self._latest = None
