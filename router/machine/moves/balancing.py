"""Free moves: running sequences leave a full decode worker for a faster worker.

The faster worker may be a fluid prefill worker without prompts.

`router.policies.balancing` chooses the sequences. A free move has the same stages as any other
(`router.machine.moves.moving`). But a lost target, a late copy or a failed copy cancels the move,
and the sequence stays. If its worker must no longer decode, the move is no longer free.

Each load report updates the predicted step of one worker. All workers are compared only if these
predictions differ by enough: a comparison takes milliseconds for a thousand workers. While any
sequence is moving, nothing is compared: drains and role changes go first, and claims of moving
sequences would count twice.
"""

from collections.abc import Mapping

from engine.messages import SeqId, WorkerId
from router.cluster.view import WorkerView
from router.machine.flight import Move
from router.machine.moves.reasons import BALANCED, COUNTED_AS, LENT
from router.machine.moves.rule import REST_S, MoveRule
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.balancing import Lenders, counted_step_s, is_idle_lender, relief
from router.policies.candidates import has_room

LOOK_EVERY_S = 0.1
STALE_S = 2.0  # workers report once a second
IN_VAIN_S = 0.005  # pause per worker after a comparison that found nothing to move


class Balancing:
    """Compares the load of decode workers from time to time, and starts moves."""

    def __init__(self, state: RouterState, placing: Placing, rule: MoveRule) -> None:
        self._state = state
        self._placing = placing
        self._rule = rule
        self.due_s: float | None = None  # time of the next comparison, unless a report comes before
        self._next_look_s = 0.0
        self._steps: dict[WorkerId, tuple[float, float]] = {}  # seconds, and when predicted

    def on_report(self, reporting: WorkerView, now_s: float) -> None:
        """Records a worker's report. Starts the moves that pay, if the last check was long ago."""
        if not self._state.config.balance:
            return
        if reporting.info.role.decodes:
            self._record(reporting, now_s)
        elif not is_idle_lender(reporting):
            return
        self._check(now_s)

    def on_computed(self, worker: WorkerView, now_s: float) -> None:
        """Records a computed prompt. A worker without further prompts may take sequences."""
        if self._lends and is_idle_lender(worker):
            self.due_s = now_s + LOOK_EVERY_S

    def on_tick(self, now_s: float) -> None:
        """Compares again if that is due."""
        if self.due_s is not None and now_s >= self.due_s:
            self.due_s = None
            self._check(now_s)

    def _check(self, now_s: float) -> None:
        state, config = self._state, self._state.config
        if now_s < self._next_look_s or state.moves.under_way():
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        idle_s = self._idle_lenders(now_s)
        if idle_s:  # after long idleness, a little more changes little
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
            assert flight.attempt is not None
            need = self._placing.need(flight, now_s)
            if not has_room(target, need):
                continue
            reason = BALANCED if target.info.role.decodes else LENT
            if reason is BALANCED:  # a lent sequence may have to come back at once
                flight.rests_until_s = now_s + REST_S
            state.counters[COUNTED_AS[reason], "begun"] += 1
            move = Move(flight.next_seq_id(), found.target, need.end_len, reason)
            self._rule.begin(flight, flight.attempt, move, now_s)

    @property
    def _lends(self) -> bool:
        """False if no sequence may go to a prefill worker, as when all have a bound on TPOT."""
        config = self._state.config
        return self._state.policy.is_fluid and config.balance and config.slo_tpot_s is None

    def _idle_lenders(self, now_s: float) -> dict[WorkerId, float]:
        """Returns the prefill workers that may take sequences now, each with its idle seconds."""
        state = self._state
        if not self._lends or state.waiting.queue:
            return {}
        lenders = filter(is_idle_lender, state.view.workers.values())
        return {w.info.worker_id: now_s - w.computing_since_s for w in lenders}

    def _may_pay(self, least_gain: float, idle_s: Mapping[WorkerId, float], now_s: float) -> bool:
        """True if predicted steps differ by enough. Predictions that are too old are renewed."""
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
        """Records the predicted step of a worker, and returns it with the time; None if unknown."""
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
        # A sequence with a TPOT bound is not lent.
        is_lent = not self._state.view.workers[target].info.role.decodes
        return not is_lent or flight.limits.tpot_s is None
