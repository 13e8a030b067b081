"""The life of a request across the pools, decided without I/O.

    arrived ──> queued ──place──> (offered) ──> prefilling ──PrefillDone──> decoding ──> ended
                  ^                   │             │                          │
                  └─────── worker lost, given back, no message in time ────────┘

The machine's record of a request (prompt, tokens so far, sampling) is its journal. The journal
determines every later token, on any worker. So after a lost attempt, prompt and tokens so far are
prefilled again on another worker. The client sees only a longer gap between two tokens.

Each placement is an *attempt* with its own SeqId, so messages about an older attempt are ignored.
If an attempt uses two workers, the decode worker receives `Decode` when the prefill worker has
opened the lease. It receives `FirstToken` when the gateway has received that token.

If requests share a prompt, only the leader of their group is queued. The followers are held back
until the leader's prompt is computed and its KV is at its decode worker, or until this has failed.
Then the followers go to the head of the queue, and are placed on the leader's two workers if these
have room. From then on each request fails over and ends by itself.

A decode worker that runs out of memory returns its youngest sequence. If the attempt produced a
token, it does not count as failed. The request waits at the head of the queue until a worker has
room. The worker that returned the request is tried again when it reports room for the whole
request, or after a back-off that grows.

A prompt that takes far longer than predicted is computed a second time on another worker
(`hedging`). The attempt that produces the first token is kept.

If a worker must no longer decode, its running sequences move (`moves`). A sequence stops when
nearly all of its KV is at the target. There it continues as an attempt whose prefill is done.

Each accepted request ends as exactly one of Finished, Rejected, Failed, Cancelled. A placement
reserves its room in the same call. When an attempt ends, its reservations are released, and a
message is sent to each of its workers.

The machine does not use sockets, clocks or text. Events and the time are its input, effects its
output. `admission` admits, `queue` orders, `policies` choose, `placing` places, `rebalance` moves
room from one API key to another, `progress` handles the messages of workers, `ends` ends attempts
and requests.
"""

import random
from collections import Counter

from msgspec.structs import replace

from engine.config import RouterConfig
from engine.errors import StepStuck
from engine.messages import Cancel, DecodeStarted, Tokens, WorkerId
from router.cluster.estimates import Estimates
from router.cluster.view import ClusterView, WorkerView
from router.machine.admission import Admission
from router.machine.ends import Ends
from router.machine.events import (
    Arrived,
    BlockEventsMissed,
    BlocksChanged,
    ClientGone,
    FromWorker,
    RouterEffect,
    RouterEvent,
    SendTo,
    Stepped,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.machine.flight import Flight, Stamps, timeline
from router.machine.hedging import Hedging
from router.machine.moves.moving import Moving
from router.machine.moves.stages import MoveStage
from router.machine.placing import Placing
from router.machine.progress import Progress
from router.machine.rebalance import Rebalance
from router.machine.requests import Cancelled, Failed, Forecast, Rejected, Update
from router.machine.state import RouterState
from router.native.index import PrefixIndex
from router.planning.demand import Demand
from router.policies.candidates import longest_predicted_s, predicted_ready_s

STUCK_FACTOR = 20.0  # longest plausible step, as a multiple of the predicted step
EARLY_FACTOR = 10.0  # longest early step, which may compile, as a multiple of `stuck_step_s`
NO_BOUNDS = (None, None, None)


class RouterMachine:
    """The state of all requests of one gateway. Only `handle` changes it."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        estimates: Estimates | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Starts without workers. `estimates` may contain costs measured in an earlier run."""
        self.state = RouterState(
            config,
            estimates=estimates or Estimates(),
            rng=rng or random.Random(config.seed or 0),
        )
        self._ends = Ends(self.state)
        self._placing = Placing(self.state, self._ends)
        self._moving = Moving(self.state, self._ends, self._placing)
        self._hedging = Hedging(self.state, self._ends, self._placing)
        self._progress = Progress(
            self.state, self._ends, self._placing, self._moving, self._hedging
        )
        self._admission = Admission(self.state)
        self._rebalance = Rebalance(self.state, self._ends, self._placing, self._admission)
        self._num_arrived = 0  # number of arrived requests, admitted or not
        self.demand = Demand(self.state, self._placing)

    @property
    def view(self) -> ClusterView:
        """The live workers and the claims on them."""
        return self.state.view

    @property
    def prefixes(self) -> PrefixIndex:
        """The known cached prefixes of all workers."""
        return self.state.workers.prefixes

    @property
    def counters(self) -> Counter[tuple[str, str]]:
        """Numbers of events since the start, by name and reason."""
        return self.state.counters

    @property
    def queue_len(self) -> int:
        """Number of requests that wait for a worker."""
        return self.state.waiting.num_requests

    @property
    def num_stranded(self) -> int:
        """Number of running sequences that must move, but wait for room or for their turn."""
        moves = self.state.moves
        return len(moves.at(MoveStage.STRANDED)) + len(moves.at(MoveStage.WAITING))

    @property
    def num_flights(self) -> int:
        """Number of requests that have not ended."""
        return len(self.state.flights)

    @property
    def longest_len(self) -> int:
        """Length in tokens of the longest running request: its prompt and its answer so far."""
        flights = self.state.flights.values()
        return max((len(f.request.token_ids) + len(f.tokens) for f in flights), default=0)

    def handle(self, event: RouterEvent, now_s: float) -> list[RouterEffect]:
        """Handles an event, and returns its effects in order."""
        effects: list[RouterEffect] = []
        if isinstance(event, FromWorker):  # the most frequent kinds of events are tested first
            effects = self._progress.on_message(event.worker_id, event.message, now_s)
        elif isinstance(event, Stepped):
            effects = self._progress.on_step(event.worker_id, event.tokens, now_s)
        else:
            match event:
                case BlocksChanged(worker_id, events):
                    if num_ignored := self.state.workers.apply_events(worker_id, events):
                        self.state.counters["block events", "unknown medium"] += num_ignored
                case Arrived():
                    effects = self._on_arrived(event, now_s)
                case ClientGone(request_id):
                    if (flight := self.state.flights.get(request_id)) is not None:
                        effects = self._ends.end(flight, Cancelled(), now_s)
                case WorkerJoined(info):
                    self.state.workers.join(info)
                case WorkerLost(worker_id, reason):
                    effects = self._on_worker_lost(worker_id, reason, now_s)
                case BlockEventsMissed(worker_id, reason):
                    if self.state.workers.remove_events(worker_id):
                        self.state.count("blocks unheard", reason)
                case Tick():
                    effects = self._on_tick(now_s)
        waits = self.state.waiting.queue.size or self.state.moves.stages
        if waits and self._may_make_room(event):
            effects += self._go_on(now_s)
        return effects

    def _go_on(self, now_s: float) -> list[RouterEffect]:
        """Moves sequences that must leave their workers, then places queued requests."""
        effects: list[RouterEffect] = []
        to_leave = self.state.moves.at(MoveStage.COPIED)
        if self.num_stranded:  # running requests get room before queued ones
            effects += self._moving.move_all(now_s)
        if self.state.waiting.queue.size:
            effects += self._placing.place_all(now_s)
            effects += self._rebalance.give(now_s)
            if self._moving.lending.give_back(now_s):
                effects += self._moving.copying.copy_next(now_s)
        if to_leave:
            effects += self._moving.copying.hand_over_next()
        return effects

    def _may_make_room(self, event: RouterEvent) -> bool:
        """True if the event may make room for the head of the queue, or for a move.

        Cached blocks change which worker is better, not which worker has room. The exception is a
        decode worker that may prefill the uncached part itself. Tokens only use up room. If
        requests arrive together, all are placed at the last one. Time also passes with each event;
        `next_wake_s` covers times at which no event arrives.
        """
        match event:
            case BlocksChanged(worker_id):
                worker = self.state.view.workers.get(worker_id)
                if worker is None or not self.state.policy.is_fluid:
                    return False
                return worker.info.is_fluid and worker.info.role.decodes
            case BlockEventsMissed() | Arrived(more_come=True):
                return False
            case FromWorker(_, Tokens(finish=None) | DecodeStarted()):
                return False
            case Stepped(_, tokens):
                return any(message.finish is not None for message in tokens)
            case _:
                return True

    def next_wake_s(self) -> float | None:
        """Returns the time in seconds of the next `Tick` that is needed; None if nothing is due."""
        state = self.state
        soonest_s, look_s = state.deadlines.soonest_s(), self._moving.balancing.due_s
        if not state.waiting.queue.size and state.moves.retry_s is None and look_s is None:
            return soonest_s
        due_s = [soonest_s, state.moves.retry_s, look_s]
        # Only the head of the queue is placed next.
        if (head := state.waiting.queue.head()) is not None:
            due_s.append(state.flights[head].back_off_until_s)
            due_s.append(None if self._placing.busy is None else self._placing.busy.until_s)
            due_s.append(self._rebalance.due_s)
        return min((at_s for at_s in due_s if at_s is not None), default=None)

    def forecast(self, worker: WorkerView, now_s: float) -> Forecast:
        """Predicts the queueing time and step time of a worker under all its claims."""
        estimates, role = self.state.estimates, worker.info.role
        num_seqs = max(worker.num_decodes, 1)
        context_tokens = worker.context_tokens + worker.foreign.context_tokens
        return Forecast(
            wait_s=predicted_ready_s(worker, estimates, now_s) if role.prefills else None,
            tpot_s=estimates.step_s(worker, num_seqs, context_tokens) if role.decodes else None,
            alone_s=estimates.step_s(worker, 1, context_tokens // num_seqs)
            if role.decodes
            else None,
            errors=estimates.errors(worker),
        )

    def longest_step_s(self, worker_id: WorkerId, *, is_early: bool = False) -> float:
        """Returns the longest plausible step of a worker in seconds. A longer step counts as hung.

        If the worker computes nothing for this gateway, the machine cannot predict its step. An
        early step is one of the first steps with its shape.
        """
        config, worker = self.state.config, self.state.view.workers.get(worker_id)
        stuck_s = config.stuck_step_s * (EARLY_FACTOR if is_early else 1.0)
        predicted_s = None
        if worker is not None and (worker.prefills or worker.decodes):
            predicted_s = longest_predicted_s(worker, self.state.estimates)
        if predicted_s is None:
            return max(stuck_s, config.progress_timeout_s)
        return max(stuck_s, STUCK_FACTOR * predicted_s)

    def validate(self) -> None:
        """Asserts the invariants of the machine, including those of reservations."""
        self.state.validate()
        self._hedging.validate()

    # ------------------------------------------------------------ arrival and departure

    def _on_arrived(self, arrived: Arrived, now_s: float) -> list[RouterEffect]:
        state, request = self.state, arrived.request
        flight = Flight(request, Stamps(arrived_s=now_s), now_s, number=self._num_arrived)
        self._num_arrived += 1
        if (bound_s := request.tpot_bound_s or state.config.slo_tpot_s) is not None:
            flight.limits = replace(request.limits, tpot_s=bound_s)
        assert request.request_id not in state.flights
        if self.demand.is_observed and not request.is_background:
            self.demand.arrived(flight, now_s)
        effects: list[RouterEffect] = []
        is_full = state.waiting.queue.size + state.waiting.num_held >= state.config.max_queue
        if is_full:
            effects = self._rebalance.make_place(flight, now_s)
        is_bounded = (
            flight.limits.tpot_s,
            request.deadline_s,
            state.config.slo_ttft_s,
        ) != NO_BOUNDS
        if (is_full or is_bounded) and (refusal := self._admission.refusal(flight, now_s)):
            stages = timeline(flight, now_s)
            return [*effects, Update((), refusal, stages, request_id=request.request_id)]
        state.flights[request.request_id] = flight
        leader = None if request.leader is None else state.flights.get(request.leader)
        if leader is not None and leader.leads:
            state.waiting.hold(flight, leader)
            return effects
        flight.shared = None if leader is None else leader.shared
        placed: list[RouterEffect] = []
        others_first = arrived.more_come or state.waiting.queue.size
        if not (others_first or (state.moves.stages and self.num_stranded)):
            placed = self._placing.place_one(flight, now_s)
        if not placed:
            state.waiting.put(flight)
            placed = self._placing.prepare(request.request_id, now_s)
        effects += placed
        return effects

    # ------------------------------------------------------------ losses

    def _on_worker_lost(self, worker_id: WorkerId, reason: str, now_s: float) -> list[RouterEffect]:
        state = self.state
        if not state.workers.lose(worker_id):
            return []
        state.counters["worker lost", reason] += 1
        effects: list[RouterEffect] = []
        # Requests are put back youngest first, so that the oldest is at the head of the queue.
        for flight in reversed(list(state.flights.values())):
            flight.kept_tokens.pop(worker_id, None)
            flight.preempted_s.pop(worker_id, None)
            hedge = flight.hedge
            if hedge is not None and worker_id in (hedge.prefill, hedge.decode):
                effects += self._ends.drop(flight, hedge, "worker lost", now_s)
            attempt = flight.attempt
            if attempt is None:
                continue
            needs_prefill = attempt.prefill == worker_id and not attempt.is_decoding
            if attempt.decode == worker_id or needs_prefill:
                if reason == StepStuck.__name__ and flight.num_excused < state.config.max_attempts:
                    # The worker may be slow, or this request makes it hang. So excused attempts are
                    # bounded.
                    effects += self._ends.excuse(flight, "worker lost", now_s)
                else:
                    effects += self._ends.retry(flight, "worker lost", now_s)
            elif attempt.holder == worker_id and attempt.offer_due_s is not None:
                effects += self._placing.compute_all(flight, attempt, "prefix holder lost", now_s)
            elif attempt.holder == worker_id:
                attempt.holder = None  # the prefill worker itself detects that its source is lost
            elif attempt.move is not None and attempt.move.decode == worker_id:
                effects += self._moving.redirect(flight, attempt, now_s)
        return effects

    # ------------------------------------------------------------ deadlines

    def _on_tick(self, now_s: float) -> list[RouterEffect]:
        """Handles only the requests whose recorded time has passed."""
        state = self.state
        self._moving.balancing.on_tick(now_s)
        due = [state.flights[request_id] for request_id in state.deadlines.pop_due(now_s)]
        # The oldest request is put back last, so it is at the head of the queue.
        due.sort(key=lambda flight: -flight.number)
        effects: list[RouterEffect] = []
        for flight in due:
            effects += self._on_due(flight, now_s)
            if flight.request.request_id in state.flights:
                state.deadlines.watch(flight)
        return effects

    def _on_due(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Handles a request whose recorded time has passed; its present deadline may be later."""
        if self.state.deadlines.deadline_s(flight) > now_s:
            effects = self._stop_waiting_for_offer(flight, now_s)
            effects += self._moving.copying.stop_waiting(flight, now_s)
            self._moving.copying.stop_gathering(flight, now_s)
            return effects + self._hedging.examine(flight, now_s)
        if flight.hedge is not None:
            effects = self._ends.drop(flight, flight.hedge, "no news in time", now_s)
            return effects + self._ends.retry(flight, "no news in time", now_s)
        if flight.attempt is not None:
            return self._ends.retry(flight, "no news in time", now_s)
        if flight.tokens:
            return self._ends.end(flight, Failed(self._why_late()), now_s)
        self.state.counters["rejected", "no room in time"] += 1
        refusal = Rejected(self._why_late(), self._admission.drain_s(now_s))
        return self._ends.end(flight, refusal, now_s)

    def _why_late(self) -> str:
        missing = self.state.view.missing()
        return "no worker had room in time" if missing is None else f"{missing} came in time"

    def _stop_waiting_for_offer(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Sends the whole prompt, and cancels the request for an offer at the holder."""
        attempt = flight.attempt
        if attempt is None or attempt.offer_due_s is None or attempt.offer_due_s > now_s:
            return []
        assert attempt.holder is not None
        cancel = SendTo(attempt.holder, Cancel(attempt.seq_id))
        return [cancel, *self._placing.compute_all(flight, attempt, "prefix offer late", now_s)]
