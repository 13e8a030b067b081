"""Moves that are not necessary: running sequences leave a full decode worker for a faster one.

`router.policies.balancing` decides which. A move goes the way of all others
(`router.machine.moves.moving`), but only as long as it is free: a lost target, a late copy or one
that failed ends it, and the sequence stays. If its worker is no longer to decode, it must go.

Each load report brings the predicted step of one worker up to date. Only if these differ by enough
are all workers looked at, which takes milliseconds for a thousand. While any sequence is on its way
there is no look: drains and flips go first, and their claims would count twice.
"""

from engine.messages import SeqId, WorkerId
from router.cluster.view import WorkerView
from router.machine.flight import Move
from router.machine.moves.rule import BALANCED, REST_S, MoveRule
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.balancing import present_step_s, relief
from router.policies.candidates import has_room

LOOK_EVERY_S = 0.5
STALE_S = 2.0  # workers report once a second
IN_VAIN_S = 0.005  # for each worker, after a look that found nothing to move


class Balancing:
    """Looks at the load of decode workers from time to time, and begins moves."""

    def __init__(self, state: RouterState, placing: Placing, rule: MoveRule) -> None:
        self._state = state
        self._placing = placing
        self._rule = rule
        self._next_look_s = 0.0
        self._steps: dict[WorkerId, tuple[float, float]] = {}  # seconds, and when predicted

    def look(self, reporting: WorkerView, now_s: float) -> None:
        """Takes in a worker's report. Begins the moves that pay, if the last look was long ago."""
        state, config = self._state, self._state.config
        if not config.balance or not reporting.info.role.decodes:
            return
        self._note(reporting, now_s)
        if now_s < self._next_look_s or state.moves.under_way():
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        if not self._may_pay(config.balance_gain, now_s):
            return
        found = relief(
            state.view,
            state.estimates,
            state.lengths,
            least_gain=config.balance_gain,
            may_leave=lambda seq_id: self._may_leave(seq_id, now_s),
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
            flight.rests_until_s = now_s + REST_S
            state.counters["balance", "begun"] += 1
            move = Move(flight.next_seq_id(), found.target, need.end_len, BALANCED)
            self._rule.begin(flight, flight.attempt, move, now_s)

    def _may_pay(self, least_gain: float, now_s: float) -> bool:
        """True if the predicted steps differ by enough. Those not reported lately are made anew."""
        workers, steps = self._state.view.workers, self._steps
        for worker_id in [i for i in steps if i not in workers]:
            del steps[worker_id]
        found = []
        for worker_id, worker in workers.items():
            if not worker.info.role.decodes:
                continue
            noted = steps.get(worker_id)
            if noted is None or now_s - noted[1] > STALE_S:
                noted = self._note(worker, now_s)
            if noted is not None:
                found.append(noted[0])
        return len(found) > 1 and max(found) > (1 + least_gain) * min(found)

    def _note(self, worker: WorkerView, now_s: float) -> tuple[float, float] | None:
        """Notes the predicted step of a worker, and returns it with the time; None if unknown."""
        step_s = present_step_s(worker, self._state.estimates)
        if step_s is None:
            return None
        noted = self._steps[worker.info.worker_id] = step_s, now_s
        return noted

    def _may_leave(self, seq_id: SeqId, now_s: float) -> bool:
        flight = self._state.by_seq[seq_id]
        attempt = flight.attempt
        return attempt is not None and attempt.is_decoding and now_s >= flight.rests_until_s
