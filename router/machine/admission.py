"""Admission of new requests, decided before any work is done for them.

A request is refused if the queue is full, or if the request is predicted to miss its bounds. An
early refusal keeps the workers free for other requests, and the client can try another server.

Both pools are predicted together, the decode pool for the time *when the request would reach it*.
Each sequence is weighted by the probability that it still runs then. All promised sequences are
added: those of prompts in the queue and of prompts in prefill workers. A gate that reads the
present decode load sees a low load while a wave of prompts is computed. Such a gate admits too many
requests, and refuses all when the wave arrives: the pools are then loaded by turns.

    time to first token   (work in the queue + left in the workers) / prefill workers, or, where
                          memory is short, until enough sequences have ended; then its own prompt;
                          sooner if no prompt waits and a decode worker has time to compute it
    time per token        a step of the sequences there at that time, evenly over decode workers,
                          and of a margin: half of all predictions fall short

`Retry-After` is the time after which the same request is predicted to be admitted, if no other
request arrives meanwhile.

Source: early rejection based on prediction, Qin et al., Mooncake, arXiv 2407.00079, §6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from engine.messages import WorkerId
from router.cluster.view import WorkerView
from router.machine.flight import Flight
from router.machine.placing import KnownPrefixes, likely_bid
from router.machine.requests import Rejected
from router.machine.state import RouterState
from router.policies.base import Need
from router.policies.candidates import LEAST_WAIT_S, predicted_ready_s
from router.policies.slo import lent_tpot_s, slowdown_of

LEAST_RETRY_S = 1.0
DRAINED = 0.5  # refused clients are told to retry when the queue is predicted to be this full


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The load per decode worker at one point in time, including promised sequences."""

    num_seqs: float
    context_tokens: float
    spread: float = 0.0  # standard deviation of `num_seqs`


class Admission:
    """Decides whether a new request is refused, and predicts waits."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    def refusal(self, flight: Flight, now_s: float) -> Rejected | None:
        """Returns the refusal of a new request; None if it is admitted."""
        state = self._state
        if state.waiting.num_requests >= state.config.max_queue:
            state.counters["rejected", "queue full"] += 1
            message = f"{state.waiting.num_requests} requests are waiting already"
            return Rejected(message, self.drain_s(now_s))
        if flight.request.leader is not None:
            return None  # followers are admitted together with the leader of their group
        if flight.request.is_background:
            return None  # the client of a background request accepts any wait
        return self._late(flight, now_s)

    def drain_s(self, now_s: float) -> float:
        """Predicts the seconds until half of the queued requests are placed."""
        state = self._state
        wait_s = self._prefill_wait_s(now_s)
        if wait_s is None:
            return LEAST_RETRY_S
        return min(max(DRAINED * wait_s, LEAST_RETRY_S), state.config.queue_timeout_s)

    def _late(self, flight: Flight, now_s: float) -> Rejected | None:
        """Returns the refusal of a request that is predicted to miss its TTFT or TPOT bound."""
        state, request = self._state, flight.request
        ttft_bound_s = _least(
            state.config.slo_ttft_s,
            None if request.deadline_s is None else request.deadline_s - now_s,
        )
        tpot_bound_s = flight.limits.tpot_s
        if request.limits.max_len <= flight.length + 1:
            tpot_bound_s = None  # the answer has one token, so there is no time between tokens
        elif tpot_bound_s is not None and self._is_quick(flight, tpot_bound_s):
            tpot_bound_s = None  # the bound is kept even if no running sequence ends first
        if ttft_bound_s is None and tpot_bound_s is None:
            return None
        ttft_s = self.predicted_ttft_s(flight, now_s)
        if ttft_s is None:
            return None
        if ttft_bound_s is not None and ttft_s > ttft_bound_s:
            state.counters["rejected", "first token late"] += 1
            message = f"the first token would come after {ttft_s:.1f} s"
            return Rejected(message, max(ttft_s - ttft_bound_s, LEAST_RETRY_S))
        if tpot_bound_s is None:
            return None
        return self._slow(flight, tpot_bound_s, now_s, now_s + ttft_s)

    # ------------------------------------------------------------ prefill

    def predicted_ttft_s(self, flight: Flight, now_s: float) -> float | None:
        """Predicts the seconds from now to a new request's first token. None if unknown."""
        wait_s = self._prefill_wait_s(now_s)
        if wait_s is None:
            return None
        known = KnownPrefixes(self._state, flight)
        matched = known.matched_tokens()
        sink = self._state.view.prefillers[0]
        compute_s = likely_bid(self._state, flight, known, sink, now_s).seconds
        if compute_s is None:
            return None
        memory_s = self._memory_wait_s(flight, now_s)
        if memory_s > 0.0:
            return max(wait_s, memory_s) + compute_s
        return min(wait_s + compute_s, self._local_ttft_s(flight, matched, now_s))

    def _local_ttft_s(self, flight: Flight, matched: Mapping[WorkerId, int], now_s: float) -> float:
        """Predicts the TTFT if a decode worker prefills; infinite if no decode worker has time."""
        state, costs = self._state, self._state.estimates
        if state.waiting.queue or not state.policy.is_fluid:
            return inf
        bound_s = flight.limits.tpot_s
        soonest_s = inf
        for worker_id, worker in state.view.workers.items():
            if not (worker.info.is_fluid and worker.info.role.decodes):
                continue
            wait_s = predicted_ready_s(worker, costs, now_s)
            compute_s = costs.prefill_s(worker, flight.length, matched.get(worker_id, 0))
            if wait_s is None or compute_s is None:
                continue
            is_idle = wait_s <= state.config.prefill_backlog_s + LEAST_WAIT_S
            if is_idle:
                soonest_s = min(soonest_s, wait_s + compute_s * slowdown_of(worker, costs, bound_s))
        return soonest_s

    def _prefill_wait_s(self, now_s: float) -> float | None:
        """Predicts the seconds until a prefill worker can start a request that arrives now."""
        state = self._state
        workers = [worker for _, worker in state.view.prefillers]
        if not workers:
            return None
        left_s = state.waiting.queued_s
        for worker in workers:
            ready_s = predicted_ready_s(worker, state.estimates, now_s)
            if ready_s is None:
                return None
            left_s += ready_s
        return left_s / len(workers)

    def _memory_wait_s(self, flight: Flight, now_s: float) -> float:
        """Predicts the seconds until decode workers have memory for the queue and this request."""
        state = self._state
        decoders, queue = self._state.view.decoders, state.waiting.queue
        if not decoders:
            return 0.0
        block_size = decoders[0].info.layout.block_size
        free = sum(max(w.info.num_blocks - w.promised_blocks, 0) for w in decoders)
        ahead = sum(state.flights[i].predicted_len(state.lengths) for i in queue)
        lacking = -(-(ahead + flight.predicted_len(state.lengths)) // block_size) - free
        places = sum(max(w.info.max_running - w.num_decodes, 0) for w in decoders)
        num_lacking = len(queue) + 1 - places
        if lacking <= 0 and num_lacking <= 0:
            return 0.0
        for num_ended, (ends_s, blocks) in enumerate(sorted(self._ends(decoders, now_s)), start=1):
            lacking -= blocks
            if lacking <= 0 and num_ended >= num_lacking:
                return ends_s - now_s if ends_s < inf else 0.0
        return 0.0  # no prediction: the time at which memory is freed is unknown

    # ------------------------------------------------------------ decode

    def _is_quick(self, flight: Flight, bound_s: float) -> bool:
        """True if the request keeps its TPOT bound even beside all present and promised sequences.

        This check is cheap, so it runs before the full prediction.
        """
        state = self._state
        if state.waiting.queue:
            return False
        decoders = self._state.view.decoders
        if not decoders:
            return True
        everything = DecodeLoad(
            state.view.decode_totals.num_seqs / len(decoders) + 1,
            self._mean_context(decoders) + flight.predicted_len(state.lengths),
        )
        return self._tpot_s(decoders[0], everything) <= bound_s

    def _slow(
        self, flight: Flight, bound_s: float, now_s: float, joins_s: float
    ) -> Rejected | None:
        """Returns the refusal if the request's tokens would take longer than its TPOT bound."""
        state = self._state
        decoders = self._state.view.decoders
        if not decoders:
            return None
        worker = decoders[0]
        load = self.load_at(decoders, joins_s, now_s)
        num_seqs = load.num_seqs + load.spread + 1
        context = load.context_tokens + (flight.length + flight.predicted_len(state.lengths)) / 2
        tpot_s = state.estimates.step_s(worker, round(num_seqs), round(context))
        if tpot_s is None or tpot_s <= bound_s:
            return None
        alone_s = state.estimates.step_s(worker, 1, flight.predicted_len(state.lengths))
        if alone_s is None or alone_s > bound_s:
            return None  # no worker could keep the bound; a slow answer is better than none
        if self._may_be_lent(flight, bound_s):
            return None
        state.counters["rejected", "tokens slow"] += 1
        share = (tpot_s - bound_s) / max(tpot_s - alone_s, 1e-9)
        num_to_end = share * num_seqs * len(decoders)
        retry_s = self._nth_end_s(decoders, num_to_end, now_s) - joins_s
        message = f"a token would take {1e3 * tpot_s:.0f} ms"
        return Rejected(message, min(max(retry_s, LEAST_RETRY_S), state.config.queue_timeout_s))

    def _may_be_lent(self, flight: Flight, bound_s: float) -> bool:
        """True if a prefill worker could decode the request within its TPOT bound."""
        state = self._state
        if not state.policy.is_fluid:
            return False
        need = Need(
            flight.length, flight.request.limits.max_len, flight.predicted_len(state.lengths)
        )
        for _, worker in state.view.prefillers:
            tpot_s = lent_tpot_s(worker, need, state.estimates)
            if tpot_s is not None and tpot_s <= bound_s:
                return True
        return False

    def load_at(self, decoders: Sequence[WorkerView], at_s: float, now_s: float) -> DecodeLoad:
        """Predicts the load of the decode pool at a future time, with arrivals until then.

        Sequences end faster when fewer of them run. So a first estimate assumes the present number
        of sequences, and a second estimate assumes the number that the first one predicted.
        """
        claims = [claim for worker in decoders for claim in worker.decodes.values()]
        num_there = sum(claim.num_tokens > 0 for claim in claims)
        load = DecodeLoad(num_there / len(decoders), self._mean_context(decoders))
        for _ in range(2):
            load = self._load_at_tpot(decoders, at_s, now_s, self._tpot_s(decoders[0], load))
        return load

    def _load_at_tpot(
        self, decoders: Sequence[WorkerView], at_s: float, now_s: float, tpot_s: float
    ) -> DecodeLoad:
        """Returns the load; sequences are weighted by the probability that they still run then."""
        state, survival = self._state, self._state.lengths.survival
        queue = state.waiting.queue
        num_seqs = float(len(queue))
        variance = 0.0
        tokens = float(sum(state.flights[request_id].length for request_id in queue))
        for worker in decoders:
            num_seqs += worker.foreign.seqs
            tokens += worker.foreign.context_tokens
            for claim in worker.decodes.values():
                more = max(at_s - max(claim.begins_s, now_s), 0.0) / tpot_s
                share = survival(claim.max_tokens, claim.num_tokens, more)
                num_seqs += share
                variance += share * (1 - share)
                tokens += share * (claim.context_tokens + more)
        number = len(decoders)
        return DecodeLoad(num_seqs / number, tokens / number, sqrt(variance / number))

    def _mean_context(self, decoders: Sequence[WorkerView]) -> float:
        return self._state.view.decode_totals.context_tokens / len(decoders)

    def _tpot_s(self, worker: WorkerView, load: DecodeLoad) -> float:
        """Predicts the seconds per token under a load; infinite if unknown."""
        num_seqs, context_tokens = max(round(load.num_seqs), 1), round(load.context_tokens)
        tpot_s = self._state.estimates.step_s(worker, num_seqs, context_tokens)
        return inf if tpot_s is None else tpot_s

    def _ends(self, decoders: Sequence[WorkerView], now_s: float) -> list[tuple[float, int]]:
        """Returns the predicted end of each sequence, and the number of blocks that it frees."""
        num_seqs = self._state.view.decode_totals.num_seqs
        load = DecodeLoad(num_seqs / len(decoders), self._mean_context(decoders))
        tpot_s = self._tpot_s(decoders[0], load)
        left = self._state.lengths.left
        return [
            (
                max(claim.begins_s, now_s) + tpot_s * left(claim.max_tokens, claim.num_tokens),
                claim.blocks,
            )
            for worker in decoders
            for claim in worker.decodes.values()
        ]

    def _nth_end_s(self, decoders: Sequence[WorkerView], number: float, now_s: float) -> float:
        """Returns the time at which `number` sequences are predicted to have ended."""
        ends_s = sorted(ends_s for ends_s, _ in self._ends(decoders, now_s))
        if not ends_s:
            return now_s
        return ends_s[min(max(ceil(number) - 1, 0), len(ends_s) - 1)]


def _least(*bounds_s: float | None) -> float | None:
    return min((bound_s for bound_s in bounds_s if bound_s is not None), default=None)
