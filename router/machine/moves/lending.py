"""Prefill workers give back the sequences that they decode, when prompts wait for them.

A fluid prefill worker without work decodes what has no better place (`router.policies.slo`). These
sequences slow its prompts down. So when the head of the queue waits for a prefill worker, they may
move to decode workers. A move goes the way of all others (`router.machine.moves.moving`).

A sequence with a bound on TPOT moves if its target has room and keeps the bound. Without a bound it
moves if the rule by which it was lent says so for its tokens to come, its transfer included.
"""

from engine.messages import Role
from router.cluster.view import WorkerView
from router.machine.flight import Flight, Move
from router.machine.moves.rule import GIVEN_BACK, REST_S, MoveRule
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.base import Need
from router.policies.slo import drag_of, lend_ratio, lending_loss_s, tpot_s

LOOK_EVERY_S = 0.1


class Lending:
    """Begins the moves of sequences that prefill workers give back."""

    def __init__(self, state: RouterState, placing: Placing, rule: MoveRule) -> None:
        self._state = state
        self._placing = placing
        self._rule = rule
        self._next_look_s = 0.0

    def give_back(self, now_s: float) -> bool:
        """Begins moves if prompts wait, unless it looked a moment ago. True if it began any."""
        busy = self._placing.busy
        if busy is None or busy.lacks is not Role.PREFILL or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
        lent = [
            (self._state.by_seq[seq_id], worker)
            for worker in self._state.view.workers.values()
            if worker.info.role is Role.PREFILL
            for seq_id in worker.decodes
        ]
        return sum([self._move(flight, worker, now_s) for flight, worker in lent]) > 0

    def _move(self, flight: Flight, worker: WorkerView, now_s: float) -> bool:
        attempt = flight.attempt
        assert attempt is not None
        is_free = attempt.is_lent and attempt.is_decoding and attempt.move is None
        if not is_free or now_s < flight.rests_until_s:
            return False
        need = self._placing.need(flight, now_s)
        target = self._rule.choose(attempt, need)
        if target is None:
            return False
        if not self._pays(flight, need, (worker, self._state.view.workers[target]), now_s):
            return False
        flight.rests_until_s = now_s + REST_S
        self._state.counters["give back", "begun"] += 1
        move = Move(flight.next_seq_id(), target, need.end_len, GIVEN_BACK)
        self._rule.begin(flight, attempt, move, now_s)
        return True

    def _pays(
        self, flight: Flight, need: Need, way: tuple[WorkerView, WorkerView], now_s: float
    ) -> bool:
        """True if a sequence should move on this way. While times are unknown it should."""
        (here, there), costs, bound_s = way, self._state.estimates, flight.limits.tpot_s
        joined_s = tpot_s(there, need, costs)
        here_s = costs.step_s(here, here.num_decoding, here.decoding_context_tokens)
        if joined_s is None or here_s is None:
            return True
        if bound_s is not None:
            return joined_s <= bound_s
        queue = self._placing.queue(flight, now_s)
        loss_s = lending_loss_s(queue, drag_of(here, costs, bound_s))
        gain_s = (joined_s - here_s * lend_ratio(queue)) * need.num_to_come
        return loss_s > gain_s + costs.pull_s(there, flight.length)
