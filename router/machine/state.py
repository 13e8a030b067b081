"""The request machine's state and its invariants.

It has one owner: only what `RouterMachine.handle` calls changes it.
"""

import random
from collections import Counter
from collections.abc import Callable, Set

from engine.config import RouterConfig
from engine.messages import RequestId, RoleChanged, SeqId, WorkerId
from router.cluster.estimates import Estimates
from router.cluster.lengths import AnswerLengths
from router.cluster.view import ClusterView, WorkerView
from router.machine.deadlines import Deadlines
from router.machine.flight import Attempt, Flight
from router.machine.moves.stages import Moves
from router.machine.queue import FairQueue, HeldBack
from router.policies import make_policy
from router.policies.base import Busy, Placer, Policy
from router.prefixes.base import Prefixes

# A tenant's turn, in tokens of prompts and predicted answers: a larger one takes fewer turns
# to reach a long request, a smaller one shares finer.
QUANTUM_TOKENS = 4096.0
SEVERED_S = 10.0  # after a failed pull, two workers are kept apart for this long
HEDGE_SHARE = 0.05  # of all placements, second attempts at the most
HEDGE_BURST = 8.0  # that many may have been saved up


# Makes the placer that decides in the policy's stead; None for policies without one.
MakePlacer = Callable[[Policy, ClusterView, Prefixes, Estimates], Placer | None]


class RouterState:
    """Workers, requests, and what has been learned."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        estimates: Estimates,
        rng: random.Random,
        prefixes: Prefixes,
        make_placer: MakePlacer,
    ) -> None:
        self.config = config
        self.estimates = estimates
        self.rng = rng
        self.policy: Policy = make_policy(config.policy)
        self.view = ClusterView()
        self.prefixes = prefixes
        self.fleet = make_placer(self.policy, self.view, prefixes, estimates)
        self.lengths = AnswerLengths()
        self.flights: dict[RequestId, Flight] = {}
        self.num_arrived = 0  # requests, let in or not
        self.queue = FairQueue(QUANTUM_TOKENS)
        self.held = HeldBack()
        self.deadlines = Deadlines()
        self.by_seq: dict[SeqId, RequestId] = {}
        self.counters: Counter[tuple[str, str]] = Counter()
        self.queued_s = 0.0  # predicted to compute the prompts in the queue
        self.locally_s = 0.0  # share of the predicted work that went to decode workers
        self.busy: Busy | None = None  # what the head of the queue waits for
        self.turn_due_s: float | None = None  # when a key that waits may be given others' room
        self.moves = Moves()
        self.hedge_credit = HEDGE_BURST  # second attempts that may be begun
        self.heard: set[WorkerId] = set()  # workers that tell by themselves what they cache

    def count(self, event: str, reason: str) -> None:
        """Counts what a worker's word led to. Details, which are behind a colon, are left out: they
        name addresses and numbers, of which there is no end.
        """
        self.counters[event, reason.partition(":")[0]] += 1

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self.queue) + len(self.held)

    def give_role(self, worker: WorkerView, message: RoleChanged) -> None:
        """Changes the role of a worker. Claims on it stay."""
        if self.fleet is not None:
            self.fleet.forget(worker)
        worker.change_role(message)
        self.view.measure()
        if self.fleet is not None:
            self.fleet.add(worker)

    def put(self, flight: Flight) -> None:
        """A new request waits for its turn."""
        self._begin_wait(flight)
        request = flight.request
        self.queue.put(
            request.request_id,
            priority=request.priority,
            tenant=request.tenant,
            work=self.work(flight),
        )
        self.watch(flight)

    def put_back(self, flight: Flight) -> None:
        """A request that had its turn waits before all others."""
        self._begin_wait(flight)
        self.queue.put_back(flight.request.request_id, work=self.work(flight))
        self.watch(flight)

    def take(self, flight: Flight) -> None:
        """A request waits no longer: it is being placed."""
        self.queue.remove(flight.request.request_id)
        self._end_wait(flight)

    def drop(self, flight: Flight) -> None:
        """A request waits no longer: it is over."""
        self.queue.discard(flight.request.request_id)
        self._end_wait(flight)

    def watch(self, flight: Flight) -> None:
        """Takes note of its next deadline; wanted where that may be earlier than it was."""
        self.deadlines.note(flight.request.request_id, self.due_s(flight))

    def due_s(self, flight: Flight) -> float:
        """When the next of its deadlines falls due. One that is held back has none."""
        attempt = flight.attempt
        due_s = self.deadline_s(flight)
        if attempt is not None:
            if attempt.offer_due_s is not None:
                due_s = min(due_s, attempt.offer_due_s)
            if attempt.hedge_due_s is not None:
                due_s = min(due_s, attempt.hedge_due_s)
            if attempt.move is not None and attempt.move.copy_due_s is not None:
                due_s = min(due_s, attempt.move.copy_due_s)
            if attempt.move is not None and attempt.move.gather_until_s is not None:
                due_s = min(due_s, attempt.move.gather_until_s)
        return due_s

    def deadline_s(self, flight: Flight) -> float:
        """Until when a worker, or news of it, is waited for."""
        config = self.config
        if flight.attempt is None:
            overdue_s = flight.last_news_s + config.queue_timeout_s
            if flight.tokens or flight.request.deadline_s is None:
                return overdue_s
            return min(overdue_s, flight.request.deadline_s)
        timeout_s = config.progress_timeout_s
        if not flight.attempt.prefilled:
            timeout_s += flight.attempt.base_len / config.slowest_prefill_tokens_per_s
        return flight.last_news_s + timeout_s

    def _begin_wait(self, flight: Flight) -> None:
        """Counts a waiting request. Its cached part is unknown until it is looked up."""
        cost = self.estimates.any_prefill_s(flight.length)
        flight.waits_for_s = cost or 0.0
        self.queued_s += flight.waits_for_s

    def _end_wait(self, flight: Flight) -> None:
        self.queued_s = self.queued_s - flight.waits_for_s if self.queue else 0.0

    def work(self, flight: Flight) -> float:
        """Tokens that a request is predicted to cost, its journal and what is to come."""
        return flight.length + self.lengths.left(self.max_tokens(flight), len(flight.tokens))

    def max_tokens(self, flight: Flight) -> int:
        """Tokens that its answer may have."""
        return max(flight.request.limits.max_len - flight.prompt_len, 1)

    def predicted_len(self, flight: Flight) -> int:
        """The length at its end that memory is reserved for, prompt included."""
        request = flight.request
        prompt_len = flight.prompt_len
        likely = prompt_len + self.lengths.nearly_longest(self.max_tokens(flight))
        if likely > flight.length:
            return likely
        guess = min(outgrown(flight.length, prompt_len), request.limits.max_len)
        return max(guess, flight.length)

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Asserts the machine's invariants, reservations included."""
        self.view.validate()
        self.prefixes.validate()
        if self.fleet is not None:
            self.fleet.validate()
        self.queue.validate()
        assert abs(self.queued_s - sum(self.flights[i].waits_for_s for i in self.queue)) < 1e-6
        assert self.heard <= set(self.view.workers)
        assert self.prefixes.workers == set(self.view.workers)
        self._validate_deadlines()
        waiting = {i for i, f in self.flights.items() if f.attempt is None}
        held = {i for i in waiting if i in self.held}
        assert waiting - held == set(self.queue)
        self._validate_groups(held)
        attempts = {a.seq_id: a for flight in self.flights.values() for a in flight.attempts}
        copies = {m.copy_id for a in attempts.values() if (m := a.move) and m.copy_id}
        assert attempts.keys() | copies == set(self.by_seq)
        self._validate_claims(attempts)
        self.moves.validate(self.flights, self.view)
        for attempt in attempts.values():
            self._validate_attempt(attempt)
        for flight in self.flights.values():
            self._validate_hedge(flight)
        assert 0.0 <= self.hedge_credit <= HEDGE_BURST

    def _validate_deadlines(self) -> None:
        self.deadlines.validate()
        for request_id, flight in self.flights.items():
            noted_s = self.deadlines.noted_s(request_id)
            if request_id in self.held:
                assert noted_s is None
            else:
                assert noted_s is not None
                assert noted_s <= self.due_s(flight)

    def _validate_groups(self, held: Set[RequestId]) -> None:
        self.held.validate()
        assert len(self.held) == len(held)
        for request_id in held:
            leader = self.flights[request_id].request.leader
            assert leader is not None
            assert leader not in self.held
            assert self.flights[leader].leads, "held back without a leader"

    def _validate_claims(self, attempts: dict[SeqId, Attempt]) -> None:
        for worker_id, worker in self.view.workers.items():
            prefills = {
                i for i, a in attempts.items() if a.prefill == worker_id and not a.prefilled
            }
            decodes = {i for i, a in attempts.items() if a.decode == worker_id}
            moves = [a.move for a in attempts.values() if a.move is not None]
            arriving = {move.seq_id for move in moves if move.decode == worker_id}
            assert set(worker.prefills) == prefills
            assert set(worker.decodes) == decodes | arriving
            for seq_id, claim in worker.decodes.items():
                if seq_id in arriving:
                    continue  # as it was when the move began
                flight = self.flights[self.by_seq[seq_id]]
                assert claim.context_tokens == flight.length
                assert claim.blocks >= worker.info.layout.num_blocks_for(flight.length)

    def _validate_attempt(self, attempt: Attempt) -> None:
        workers = self.view.workers
        assert attempt.decode in workers
        assert attempt.is_decoding or attempt.prefill in workers
        if attempt.move is not None:
            assert attempt.is_decoding
            assert attempt.move.decode in workers
            assert attempt.move.decode != attempt.decode
            assert attempt.move.seq_id not in self.by_seq
        assert attempt.hedge_due_s is None or not attempt.prefilled
        if attempt.holder is not None:
            assert attempt.holder in workers
            assert attempt.holder != attempt.prefill
            assert attempt.started_s is None
        else:
            assert attempt.offer_due_s is None

    def _validate_hedge(self, flight: Flight) -> None:
        """Two attempts are at two workers, and of neither there is a token."""
        first, second = flight.attempt, flight.hedge
        if second is None:
            return
        assert first is not None
        assert flight.num_hedges == 1
        assert not any(each.prefilled for each in (first, second))
        assert first.prefill != second.prefill
        assert first.hedge_due_s is None
        assert second.hedge_due_s is None
        assert second.holder is None
        assert second.move is None


def outgrown(length: int, prompt_len: int) -> int:
    """A new guess for an answer that became longer than predicted: half as much again."""
    return length + max((length - prompt_len) // 2, 16)
