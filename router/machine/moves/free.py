"""Free moves: `Balancing` moves running sequences from a full decode worker to a faster worker.
`Lending` moves the sequences that a prefill worker decodes to other workers, when prompts come.

A free move has the same stages as any other move (`router.machine.moves.moving`). But a lost
target, a late copy or a failed copy cancels the move, and the sequence stays. If its worker must no
longer decode, the move is no longer free.

*Balancing.* The faster worker may be a fluid prefill worker without prompts.
`router.policies.balancing` chooses the sequences. Each load report updates the predicted step of
one worker. All workers are compared only if these predictions differ by enough: a comparison takes
milliseconds for a thousand workers. While any sequence is moving, nothing is compared: drains and
role changes have priority, and claims of moving sequences would count twice.

*Lending.* A fluid prefill worker without work decodes sequences that find no better worker
(`router.policies.slo`), or that leave a full decode worker. These sequences delay the worker's own
prompts. So when the head of the queue waits for a prefill worker, the sequences may move to decode
workers.

A sequence with a TPOT bound moves if its target has room and keeps the bound. A sequence without a
bound moves if the rule by which it was lent now favours the target. The rule compares the remaining
tokens and the transfer. The rule is also checked when the worker starts a prompt, because the
sequence may have been lent in a pause between prompts.

If no decode worker may take a sequence with a bound, it moves to a prefill worker that already
decodes more sequences. Each prefill worker that decodes at all loses about half of its time for
prompts.
"""

from collections.abc import Mapping

from engine.messages import Role, SeqId, WorkerId
from router.cluster.view import WorkerView
from router.machine.flight import BALANCED, GATHERED, GIVEN_BACK, LENT, Flight
from router.machine.moves.rule import MoveRule
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.balancing import Lenders, counted_step_s, is_idle_lender, reachable, relief
from router.policies.base import Need
from router.policies.candidates import has_room
from router.policies.slo import (
    joined_price_s,
    lend_ratio,
    lending_loss_s,
    lent_tpot_s,
    slowdown_of,
    token_price_s,
    tpot_s,
)

LOOK_EVERY_S = 0.1
STALE_S = 2.0  # maximum age in seconds of a prediction; workers report once a second
IN_VAIN_S = 0.005  # seconds of pause per worker, after a comparison found no move


class Balancing:
    """Compares the load of decode workers periodically, and starts moves."""

    def __init__(self, state: RouterState, placing: Placing, rule: MoveRule) -> None:
        self._state = state
        self._placing = placing
        self._rule = rule
        self.due_s: float | None = None  # time of the next comparison, if no report triggers one
        self._next_look_s = 0.0
        # Predicted step in seconds and time of the prediction, by worker.
        self._steps: dict[WorkerId, tuple[float, float]] = {}

    def on_report(self, reporting: WorkerView, now_s: float) -> None:
        """Records a worker's report. Starts moves that gain, if the last check was long ago."""
        if not self._state.config.balance:
            return
        if reporting.info.role.decodes:
            self._record(reporting, now_s)
        elif not is_idle_lender(reporting):
            return
        self._check(now_s)

    def on_computed(self, worker: WorkerView, now_s: float) -> None:
        """Records that a prompt was computed. A worker without other prompts may take sequences."""
        if self._lends and is_idle_lender(worker):
            self.due_s = now_s + LOOK_EVERY_S

    def on_tick(self, now_s: float) -> None:
        """Compares the workers if a comparison is due."""
        if self.due_s is not None and now_s >= self.due_s:
            self.due_s = None
            self._check(now_s)

    def _check(self, now_s: float) -> None:
        state, config = self._state, self._state.config
        if now_s < self._next_look_s or state.moves.under_way():
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        idle_s = self._idle_lenders(now_s)
        if idle_s:  # the longer a worker has been idle, the later the next comparison
            self.due_s = now_s + max(LOOK_EVERY_S, min(idle_s.values()))
        if not self._may_pay(config.balance_gain, idle_s, now_s):
            return
        found = relief(
            state.view,
            state.estimates,
            state.lengths,
            least_gain=config.balance_gain,
            may_leave=lambda seq_id, target: self._may_leave(seq_id, target, now_s),
            lenders=Lenders(idle_s, self._placing.cached_token_s),
        )
        if found is None:
            self._next_look_s = now_s + max(LOOK_EVERY_S, IN_VAIN_S * len(state.view.workers))
            return
        target = state.view.workers[found.target]
        for seq_id in found.seq_ids:
            flight = state.by_seq[seq_id]
            if not has_room(target, self._placing.need(flight, now_s)):
                continue
            # A prefill worker may have to return the sequence at once, so no rest period follows.
            reason = BALANCED if target.info.role.decodes else LENT
            self._rule.start_free(flight, found.target, reason, now_s)

    @property
    def _lends(self) -> bool:
        """False if no sequence may move to a prefill worker: for example, all have a TPOT bound."""
        config = self._state.config
        return self._state.policy.is_fluid and config.balance and config.slo_tpot_s is None

    def _idle_lenders(self, now_s: float) -> dict[WorkerId, float]:
        """Returns the prefill workers that may take sequences now, with their idle seconds."""
        state = self._state
        if not self._lends or state.waiting.queue:
            return {}
        lenders = filter(is_idle_lender, state.view.workers.values())
        return {w.info.worker_id: now_s - w.computing_since_s for w in lenders}

    def _may_pay(self, least_gain: float, idle_s: Mapping[WorkerId, float], now_s: float) -> bool:
        """True if predicted steps differ by enough. Renews predictions that are too old."""
        workers, steps = self._state.view.workers, self._steps
        for worker_id in [i for i in steps if i not in workers]:
            del steps[worker_id]
        counted_s = [counted_step_s(workers[i], self._state.estimates) for i in idle_s]
        found = [step_s for step_s in counted_s if step_s is not None]
        for worker_id, worker in workers.items():
            if not worker.info.role.decodes:
                continue
            noted = steps.get(worker_id)
            if noted is None or now_s - noted[1] > STALE_S:
                noted = self._record(worker, now_s)
            if noted is not None:
                found.append(noted[0])
        return len(found) > 1 and max(found) > (1 + least_gain) * min(found)

    def _record(self, worker: WorkerView, now_s: float) -> tuple[float, float] | None:
        """Records a worker's predicted step. Returns the step and the time; None if unknown."""
        step_s = counted_step_s(worker, self._state.estimates)
        if step_s is None:
            return None
        noted = self._steps[worker.info.worker_id] = step_s, now_s
        return noted

    def _may_leave(self, seq_id: SeqId, target: WorkerId, now_s: float) -> bool:
        flight = self._state.by_seq[seq_id]
        attempt = flight.attempt
        if attempt is None or not attempt.is_decoding or now_s < flight.rests_until_s:
            return False
        # A sequence with a TPOT bound does not move to a prefill worker.
        is_lent = not self._state.view.workers[target].info.role.decodes
        return not is_lent or flight.limits.tpot_s is None


class Lending:
    """Starts moves of sequences away from prefill workers that decode them."""

    def __init__(self, state: RouterState, placing: Placing, rule: MoveRule) -> None:
        self._state = state
        self._placing = placing
        self._rule = rule
        self._next_look_s = 0.0

    def on_prompt(self, worker: WorkerView, now_s: float) -> bool:
        """Starts moves of sequences without a bound from a worker that has started a prompt.

        Returns True if any move started. The search stops at the first sequence that should stay.
        All sequences of the worker have the same step time, and comparing all decode workers for
        each sequence would take too long.
        """
        began = False
        for flight in self._lent_by(worker, now_s):
            if flight.limits.tpot_s is not None:
                continue
            if not self._move(flight, worker, now_s):
                break
            began = True
        return began

    def give_back(self, now_s: float) -> bool:
        """Starts moves if prompts wait. Returns True if any move started.

        After a call, further calls do nothing for `LOOK_EVERY_S`.
        """
        if self._placing.busy is None or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
        workers = self._state.view.workers.values()
        lenders = [w for w in workers if w.info.role is Role.PREFILL and w.num_decodes]
        lenders.sort(key=lambda worker: worker.num_decodes)
        lent = [(flight, worker) for worker in lenders for flight in self._lent_by(worker, now_s)]
        moving = [self._move(flight, worker, now_s) for flight, worker in lent]
        return any(moving)

    def _lent_by(self, worker: WorkerView, now_s: float) -> list[Flight]:
        """Returns the requests that a prefill worker decodes and that may move now."""
        if worker.info.role is not Role.PREFILL:
            return []
        by_seq, worker_id = self._state.by_seq, worker.info.worker_id
        # Room that is reserved by moves has sequence ids that `by_seq` lacks.
        flights = [by_seq[seq_id] for seq_id in worker.decodes if seq_id in by_seq]
        return [flight for flight in flights if _may_move(flight, worker_id, now_s)]

    def _move(self, flight: Flight, worker: WorkerView, now_s: float) -> bool:
        need = self._placing.need(flight, now_s)
        reason, target = self._target(flight, need, worker, now_s)
        if target is None:
            return False
        self._rule.start_free(flight, target, reason, now_s)
        return True

    def _target(
        self, flight: Flight, need: Need, worker: WorkerView, now_s: float
    ) -> tuple[str, WorkerId | None]:
        """Returns the reason and the target of a move; without a target, the sequence stays."""
        view, attempt = self._state.view, flight.attempt
        assert attempt is not None
        target = self._rule.choose(attempt, need)
        if target is not None and self._pays(flight, need, (worker, view.workers[target]), now_s):
            return GIVEN_BACK, target
        bound_s = flight.limits.tpot_s
        fuller = None if bound_s is None else self._fuller_lender(need, worker, bound_s)
        return GATHERED, fuller

    def _fuller_lender(self, need: Need, here: WorkerView, bound_s: float) -> WorkerId | None:
        """Returns the prefill worker with the longest steps within the bound, among fuller ones.

        Returns None if no other prefill worker decodes more sequences and keeps the bound.
        """
        costs = self._state.estimates
        paces_s = [
            (pace_s, worker_id)
            for worker_id, worker in reachable(self._state.view, here.info.worker_id)
            if worker.num_decodes > here.num_decodes
            and (pace_s := lent_tpot_s(worker, need, costs)) is not None
            and pace_s <= bound_s
        ]
        return max(paces_s)[1] if paces_s else None

    def _pays(
        self, flight: Flight, need: Need, way: tuple[WorkerView, WorkerView], now_s: float
    ) -> bool:
        """True if the sequence should move to this worker, or if the times are unknown."""
        (here, there), costs, bound_s = way, self._state.estimates, flight.limits.tpot_s
        pace_s = tpot_s(there, need, costs)
        if pace_s is None:
            return True
        if bound_s is not None:
            return pace_s <= bound_s
        there_s, context_tokens = joined_price_s(there, need, costs), here.decoding_context_tokens
        here_s = token_price_s(here, costs, here.num_decoding, context_tokens, flight.length)
        if there_s is None or here_s is None:
            return True
        queue, slowdown = self._placing.queue(flight, now_s), slowdown_of(here, costs, bound_s)
        loss_s = lending_loss_s(queue, slowdown)
        gain_s = (there_s - here_s * lend_ratio(queue, slowdown)) * need.num_to_come
        return loss_s > gain_s + costs.pull_s(there, flight.length)


def _may_move(flight: Flight, lender: WorkerId, now_s: float) -> bool:
    """True if the sequence runs on the prefill worker, does not move, and has not just moved."""
    attempt = flight.attempt
    if attempt is None or attempt.decode != lender or attempt.move is not None:
        return False
    return attempt.is_lent and attempt.is_decoding and now_s >= flight.rests_until_s
