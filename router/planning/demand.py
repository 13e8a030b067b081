"""One gateway's demand on the workers, for the planner of pools.

A request is counted when it arrives, even if it is refused. It is counted with the predictions of
that time: the seconds to compute its prompt without the cached part, and the tokens of its answer.
Prompts that a decode worker computed locally are subtracted again.

A request that waits for a decode worker does not wait for a prefill worker. So the whole queue
counts towards the pool for which its first request waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.demand import Observation
from engine.messages import Role, WorkerId
from router.cluster.view import ClusterView
from router.machine.flight import Flight
from router.machine.placing import KnownPrefixes, Placing, likely_bid
from router.machine.state import RouterState
from router.planning.planner import FlipCandidate

LOOK_AFTER_S = 0.9  # seconds; below 1, so that a caller each second gets new data

_AS_THEY_ARE: Mapping[WorkerId, Role] = {}


def members(
    view: ClusterView, roles: Mapping[WorkerId, Role] = _AS_THEY_ARE
) -> list[FlipCandidate]:
    """Returns all workers except stores, with the tokens that a flip would move or give back.

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


@dataclass(slots=True)
class _Sums:
    """Sums since the last observation."""

    num_requests: int = 0
    prefill_s: float = 0.0
    output_tokens: float = 0.0


class Demand:
    """The sums over requests that arrive at a router, while a planner observes them."""

    def __init__(self, state: RouterState, placing: Placing) -> None:
        self._state = state
        self._placing = placing
        self._sums = _Sums()
        self._locally_s = 0.0  # the machine's `locally_s` at the last observation
        self._observed_s: float | None = None  # time of the last observation
        self._latest: Observation | None = None
        self.is_observed = False  # True while a planner observes this gateway; most have none

    def arrived(self, flight: Flight, now_s: float) -> None:
        """Counts a new request, whatever its outcome. Call this only while `is_observed`."""
        flight.compute_s = self._prefill_s(flight, now_s)
        self._sums.num_requests += 1
        self._sums.prefill_s += flight.compute_s
        self._sums.output_tokens += self._state.lengths.mean(flight.max_tokens)

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
        cached = cached if source is None else source.num_tokens
        return state.estimates.prefill_s(sink[1], flight.length, cached) or 0.0

    def latest(self, now_s: float) -> Observation | None:
        """Returns the last observation, which is renewed about once a second.

        Observing resets the sums, so more frequent calls return the same observation. Returns None
        before the end of the first second.
        """
        if self._observed_s is None:
            self.observe(now_s)
        elif now_s - self._observed_s >= LOOK_AFTER_S:
            self._latest = self.observe(now_s)
        return self._latest

    def rest(self) -> None:
        """Stops summing, because no planner asks. The next observation starts again."""
        self._observed_s = self._latest = None
        self.is_observed = False

    def observe(self, now_s: float) -> Observation:
        """Returns the demand since the last call, and the present load."""
        state, placing, sums = self._state, self._placing, self._sums
        queued = [state.flights[request_id] for request_id in state.waiting.queue]
        if self._observed_s is None:
            for one in queued:  # these arrived before the planner observed
                one.compute_s = self._prefill_s(one, now_s)
        over_s = 0.0 if self._observed_s is None else now_s - self._observed_s
        sent_s = sums.prefill_s - (placing.locally_s - self._locally_s)
        self._sums, self._locally_s = _Sums(), placing.locally_s
        self._observed_s, self.is_observed = now_s, True
        per_s = 1 / over_s if over_s > 0 else 0.0
        workers = state.view.workers.values()
        decoders = [worker for worker in workers if worker.decodes]
        costs = [state.estimates.decode_cost(w) for w in workers if w.info.role.decodes]
        waits_for_prefill = placing.busy is not None and placing.busy.lacks is Role.PREFILL
        reserved = [(w, w.reserved_blocks * w.info.layout.block_size) for w in decoders]
        return Observation(
            requests_per_s=sums.num_requests * per_s,
            prefill_s_per_s=max(sent_s, 0.0) * per_s,
            output_tokens_per_s=sums.output_tokens * per_s,
            queued_s=sum(one.compute_s for one in queued) if waits_for_prefill else 0.0,
            prefilling_s=sum(
                w.ready_s(now_s) for w in workers if w.info.role.prefills and w.prefills
            ),
            num_queued=0 if waits_for_prefill else len(queued),
            queued_tokens=0 if waits_for_prefill else sum(one.length for one in queued),
            num_decoding=sum(len(worker.decodes) for worker in decoders),
            context_tokens=sum((w.context_tokens + tokens) // 2 for w, tokens in reserved),
            reserved_tokens=sum(tokens for _, tokens in reserved),
            decode_cost=next((cost for cost in costs if cost is not None), None),
        )
