"""Placement: takes the next request from the queue, computes its need, and sends it to workers.

If another worker has a longer prefix of the prompt cached and the policy wants to pull that prefix,
this worker (the holder) is first asked for an offer. The prefill message then carries the offered
lease. If no offer arrives in time, the whole prompt is computed. A store also offers blocks on
lower media, and reads them while they are pulled. If a new request must wait, the store is told to
read its prefix in the meantime.
"""

from collections.abc import Mapping, Sequence
from math import inf

from engine.messages import (
    MAX_HASHES,
    Generate,
    LeaseRef,
    OfferPrefix,
    Prefetch,
    Prefill,
    RequestId,
    Role,
    WorkerId,
)
from engine.worker.blocks import BlockHash
from router.cluster.learning import PromptLoad
from router.machine.ends import Ends
from router.machine.events import RouterEffect, SendTo
from router.machine.explaining import Explaining
from router.machine.flight import Attempt, Flight
from router.machine.requests import Failed
from router.machine.state import RouterState
from router.policies.base import Asked, Busy, Candidates, Decision, Impossible, Need, Queue, Worker
from router.policies.candidates import (
    LEAST_WAIT_S,
    Backlog,
    decode_blocks,
    find,
    keeper,
    predicted_ready_s,
    tokens_to_compute,
    with_leader,
)
from router.policies.pulling import Bid, Holders, bid

HEDGE_LEAST_S = 1.0  # minimum seconds to a hedge; predictions are not more exact


class Placing:
    """Places waiting requests."""

    def __init__(self, state: RouterState, ends: Ends) -> None:
        self._state = state
        self._ends = ends
        self.busy: Busy | None = None  # the reason why the head of the queue waits
        self.locally_s = 0.0  # total predicted seconds of prompts placed on decode workers
        self._load = PromptLoad()
        self._explaining = Explaining(state, self.room_for)
        self.num_placed = 0

    def place_all(self, now_s: float) -> list[RouterEffect]:
        """Places queued requests in order, while there is room."""
        state = self._state
        state.view.remove_severed(now_s)
        self.busy = None
        effects: list[RouterEffect] = []
        while (head := state.waiting.queue.head()) is not None:
            flight = state.flights[head]
            need, known = self.need(flight, now_s), KnownPrefixes(state, flight)
            match self.choose(flight, need, now_s, known):
                case Busy() as busy:
                    self.busy = busy
                    break
                case Impossible(reason):
                    effects += self._ends.end(flight, Failed(reason), now_s)
                case Decision() as decision:
                    state.waiting.pop(flight)
                    effects.append(self._place(flight, decision, need, known, now_s))
        return effects

    def place_one(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Places a new request, or a queued request out of order, if there is room."""
        state = self._state
        state.view.remove_severed(now_s)
        need, known = self.need(flight, now_s), KnownPrefixes(state, flight)
        decision = self.choose(flight, need, now_s, known)
        if not isinstance(decision, Decision):
            return []
        if state.waiting.queue.size and flight.request.request_id in state.waiting.queue:
            state.waiting.pop(flight)
        return [self._place(flight, decision, need, known, now_s)]

    def need(self, flight: Flight, now_s: float) -> Need:
        """Returns the need of the next attempt. Only a first attempt prefers its leader's workers.

        A request whose answer has begun does not wait for its TPOT bound: it gets the fastest
        worker.
        """
        if flight.back_off_until_s is not None and flight.back_off_until_s <= now_s:
            flight.back_off_until_s = None
        request = flight.request
        return Need(
            num_tokens=flight.length,
            max_len=request.limits.max_len,
            predicted_len=flight.predicted_len(self._state.lengths),
            kept_tokens=flight.kept_tokens,
            shared=flight.shared if flight.num_attempts == 0 else None,
            preempted_s={} if flight.back_off_until_s is None else flight.preempted_s,
            tpot_bound_s=None if flight.tokens else flight.limits.tpot_s,
            may_pull=flight.prompt_logprobs is None,
        )

    def choose(
        self,
        flight: Flight,
        need: Need,
        now_s: float,
        known: "KnownPrefixes | None" = None,
        *,
        other_than: WorkerId | None = None,
    ) -> Decision | Busy | Impossible:
        """Chooses a placement without `other_than`. The policy chooses if the fleet cannot."""
        known, fleet = known or KnownPrefixes(self._state, flight), self._state.workers.fleet
        if fleet is not None:
            decision: Decision | Busy | None = None
            if need.shared is not None and isinstance(
                room := self.room_for(need, now_s), Candidates
            ):
                asked = self._asked(need, known, room, now_s)
                decision = with_leader(asked, self._state.policy.name)
            if decision is None:
                queue = self.queue(flight, now_s)
                decision = fleet.choose(need, known.hashes, now_s, queue, other_than=other_than)
            if decision is not None:
                return decision
        found = self.room_for(need, now_s, other_than=other_than)
        if not isinstance(found, Candidates):
            return found
        return self._state.policy.choose(self._asked(need, known, found, now_s))

    def queue(self, flight: Flight, now_s: float) -> Queue:
        """Returns the other queued prompts and the recent prompt work, per prefill worker."""
        state = self._state
        num_workers = max(len(state.view.prefillers), 1)
        num, seconds = state.waiting.queue.size, state.waiting.queued_s
        if num and flight.request.request_id in state.waiting.queue:
            num, seconds = num - 1, seconds - flight.waits_for_s
        return Queue(
            num / num_workers,
            max(seconds, 0.0) / num_workers,
            self._load.share(num_workers, now_s),
        )

    @property
    def cached_token_s(self) -> float:
        """Seconds of later prefill that each token in a worker's cache saves."""
        return self._load.cached_token_s

    def room_for(
        self, need: Need, now_s: float, *, other_than: WorkerId | None = None
    ) -> Candidates | Busy | Impossible:
        """Returns the workers that have room now. `other_than` is excluded."""
        state, config, policy = self._state, self._state.config, self._state.policy
        backlog = None
        if policy.binds_late:
            backlog = Backlog(
                config.prefill_backlog_tokens, config.prefill_backlog_s, state.estimates, now_s
            )
        return find(
            state.view,
            need,
            backlog,
            is_fluid=policy.is_fluid,
            other_than=other_than,
        )

    def _asked(self, need: Need, known: "KnownPrefixes", found: Candidates, now_s: float) -> Asked:
        state = self._state
        bound_s = state.config.prefill_backlog_s + LEAST_WAIT_S
        return Asked(
            state.view,
            found,
            need,
            known,
            state.estimates,
            now_s,
            state.rng,
            wait_bound_s=bound_s if state.policy.binds_late else inf,
        )

    # ------------------------------------------------------------ one placement

    def _place(
        self, flight: Flight, decision: Decision, need: Need, known: "KnownPrefixes", now_s: float
    ) -> SendTo:
        state, is_alone = self._state, decision.num_candidates == 1
        if not (is_alone and state.view.workers[decision.prefill_worker].info.role.prefills):
            decision = self._explaining.explained(decision, need, known, now_s)
        if not flight.num_ids:
            flight.likely_reused = state.conversations.record(known.hashes)
        flight.attempt = attempt = self.start_attempt(flight, decision, need, now_s)
        flight.workers, flight.decision = (attempt.prefill, attempt.decode), attempt.decision
        flight.back_off_until_s = None
        state.counters["placed", decision.why] += 1
        self.num_placed += 1
        flight.last_message_s = now_s
        if not flight.tokens:
            flight.stamps.placed_s = now_s
        factor = state.config.hedge_after
        if factor is not None and decision.predicted_ttft_s is not None and not flight.num_hedges:
            attempt.hedge_after_s = max(factor * decision.predicted_ttft_s, HEDGE_LEAST_S)
        if decision.pulled_from is None:
            return self.send_prefill(flight, attempt, None, now_s)
        return self._ask_for_offer(flight, attempt, decision.pulled_from, now_s)

    def start_attempt(
        self, flight: Flight, decision: Decision, need: Need, now_s: float
    ) -> Attempt:
        """Starts an attempt, and reserves all its resources."""
        workers = self._state.view.workers
        prefill, decode = workers[decision.prefill_worker], workers[decision.decode_worker]
        flight.num_attempts += 1
        attempt = Attempt(
            flight.next_seq_id(),
            decision.prefill_worker,
            decision.decode_worker,
            need.num_tokens,
            need.end_len,
            now_s,
            decision=decision,
            is_lent=decode.info.role is Role.PREFILL,
            kept_by=decision.prefill_worker,
        )
        self._state.by_seq[attempt.seq_id] = flight
        if attempt.hands_over and need.decodes:  # otherwise there is no hand-over
            attempt.kept_by = keeper(prefill, decode, decision, need.num_tokens)
        self._claim(flight, attempt, decision, need, now_s)
        return attempt

    def _has_time(self, now_s: float) -> bool:
        """True if a prefill worker has time for one more prompt now."""
        state, bound_s = self._state, self._state.config.prefill_backlog_s + LEAST_WAIT_S
        workers = [w for w in state.view.workers.values() if w.info.role.prefills]
        ready_s = (predicted_ready_s(worker, state.estimates, now_s) for worker in workers)
        return any(wait_s is not None and wait_s <= bound_s for wait_s in ready_s)

    def _claim(
        self, flight: Flight, attempt: Attempt, decision: Decision, need: Need, now_s: float
    ) -> None:
        """Reserves the resources of the decision on both workers."""
        state = self._state
        workers, num_cached = state.view.workers, decision.num_cached_tokens
        prefill, decode = workers[attempt.prefill], workers[attempt.decode]
        compute_s = state.estimates.prefill_s(prefill, need.num_tokens, num_cached)
        num_computed = need.num_tokens - num_cached
        self._load.record(compute_s or 0.0, now_s, num_computed=num_computed, num_cached=num_cached)
        is_local = not (attempt.hands_over or prefill.info.role.prefills)
        # Demand counts the first attempt only. If a decode worker prefills because all prefill
        # workers are busy, the prompt still counts as demand on the prefill pool.
        if is_local and flight.compute_s and flight.num_attempts == 1 and self._has_time(now_s):
            self.locally_s += flight.compute_s
        pull_s = 0.0
        if decision.pulled_from is not None:
            pull_s = state.estimates.pull_s(prefill, decision.num_pulled_tokens)
            pull_s = max(pull_s, decision.predicted_load_s)
        prefill.reserve_prefill(
            attempt.seq_id,
            tokens_to_compute(prefill, need),
            prompt_tokens=need.num_tokens,
            seconds=0.0 if compute_s is None else (compute_s + pull_s) * decision.slowdown,
            now_s=now_s,
            waits=decision.pulled_from is not None,
        )
        decode.reserve_decode(
            attempt.seq_id,
            decode_blocks(decode, need),
            context_tokens=need.num_tokens,
            begins_s=now_s + (decision.predicted_ttft_s or compute_s or 0.0),
            prompt_tokens=len(flight.request.token_ids),
            max_tokens=flight.max_tokens,
        )

    def _ask_for_offer(
        self, flight: Flight, attempt: Attempt, holder: WorkerId, now_s: float
    ) -> SendTo:
        """Tells the holder to offer its prefix. The prompt is sent when the offer arrives."""
        attempt.holder = holder
        if self._state.view.workers[holder].prefills:
            attempt.asked_s = now_s
        attempt.offer_due_s = now_s + self._state.config.offer_timeout_s
        self._state.deadlines.watch(flight)
        self._state.counters["prefix offer", "asked"] += 1
        offer = OfferPrefix(
            attempt.seq_id,
            flight.token_ids,
            flight.request.salt,
            evict_first=attempt.kept_by not in (None, holder),
        )
        return SendTo(holder, offer)

    def send_prefill(
        self, flight: Flight, attempt: Attempt, prefix: LeaseRef | None, now_s: float
    ) -> SendTo:
        """Sends the prompt to its prefill worker. `prefix` is the lease on a prefix to pull."""
        request = flight.request
        attempt.offer_due_s = None
        if attempt.hedge_after_s is not None:
            attempt.hedge_due_s = now_s + attempt.hedge_after_s
        flight.last_message_s = now_s
        self._state.deadlines.watch(flight)
        kind = Prefill if attempt.hands_over else Generate
        message = kind(
            seq_id=attempt.seq_id,
            token_ids=flight.token_ids,
            sampling=request.sampling,
            limits=flight.limits,
            prefix=prefix,
            prompt_logprobs=flight.prompt_logprobs,
            salt=request.salt,
            client_id=request.client_id,
            evict_first=attempt.kept_by == attempt.decode != attempt.prefill,
            likely_reused=flight.likely_reused,
        )
        return SendTo(attempt.prefill, message)

    def prepare(self, request_id: RequestId, now_s: float) -> list[RouterEffect]:
        """Prepares a prompt that has to wait: its uncached part determines its rank in the queue.

        If pulling its prefix from a store would be quicker, the store is told to read the prefix
        into memory. A prompt that is placed at once needs no such message, as the store reads for
        the offer.
        """
        state = self._state
        flight = state.flights[request_id]
        known = KnownPrefixes(state, flight)
        sinks = state.view.prefillers
        if not sinks:
            return []
        matched = known.matched_tokens()
        sink = max(sinks, key=lambda item: matched.get(item[0], 0)) if matched else sinks[0]
        likely = likely_bid(state, flight, known, sink, now_s)
        if likely.seconds is not None:
            state.waiting.rank(flight, likely.seconds)
        source = likely.source if state.policy.pulls else None
        if source is None:
            return []
        num_blocks = source.num_tokens // sink[1].info.layout.block_size
        state.counters["prefetch", "asked"] += 1
        hashes = known.hashes[: min(num_blocks, MAX_HASHES)]
        return [SendTo(source.worker_id, Prefetch([bytes(each) for each in hashes]))]

    def compute_all(
        self, flight: Flight, attempt: Attempt, reason: str, now_s: float
    ) -> list[RouterEffect]:
        """Sends the whole prompt without a prefix to pull."""
        self._state.counters["fallback", reason] += 1
        attempt.holder = None
        return [self.send_prefill(flight, attempt, None, now_s)]


class KnownPrefixes:
    """The workers that have a prefix of a prompt. Implements `router.policies.base.Known`."""

    def __init__(self, state: RouterState, flight: Flight) -> None:
        self._state = state
        # Matched blocks by index name; None: not looked up yet.
        self._longest: Mapping[WorkerId, int] | None = None
        # Hashes of the full blocks; empty if there is only one worker.
        self.hashes: Sequence[BlockHash] = ()
        worker = state.view.computing
        if worker is not None and len(state.view.workers) > 1 and flight.prompt_logprobs is None:
            # A worker computes at least one token, because it samples from that token's logits.
            self.hashes = flight.leading_hashes(flight.length - 1, worker)

    def matched_tokens(self) -> Mapping[WorkerId, int]:
        """Returns the matched tokens of each worker, in full blocks. One token is never matched."""
        on_lower = self._state.workers.on_lower
        return {i: n for i, n in self._look_up().items() if i not in on_lower}

    def matched_below(self) -> Mapping[tuple[WorkerId, str], int]:
        """Returns the matched tokens on the lower media of stores, by store and medium."""
        on_lower = self._state.workers.on_lower
        if not on_lower:
            return {}
        return {on_lower[i]: n for i, n in self._look_up().items() if i in on_lower}

    def _look_up(self) -> Mapping[WorkerId, int]:
        if self._longest is None:
            worker, self._longest = self._state.view.computing, {}
            if self.hashes and worker is not None:
                block_size = worker.info.layout.block_size
                longest = self._state.workers.prefixes.longest(self.hashes)
                self._longest = {i: n * block_size for i, n in longest.items()}
        return self._longest


def likely_bid(
    state: RouterState, flight: Flight, known: KnownPrefixes, sink: Worker, now_s: float
) -> Bid:
    """Returns the cost at a worker, as if it had all blocks that any worker has in memory.

    The bid names a source if pulling further blocks from a lower medium would be quicker.
    """
    request, matched, has_below = flight.request, known.matched_tokens(), known.matched_below()
    if not (matched or has_below):  # a shortcut; `bid` would return the same
        return Bid(state.estimates.prefill_s(sink[1], flight.length, 0))
    need = Need(flight.length, request.limits.max_len, may_pull=flight.prompt_logprobs is None)
    found = Candidates([], [])
    asked = Asked(state.view, found, need, known, state.estimates, now_s, state.rng)
    below = Holders(asked).below_for(sink) if has_below else ()
    return bid(asked, sink, max(matched.values(), default=0), below)
