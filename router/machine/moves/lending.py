"""Prefill workers give back the sequences that they decode, when prompts come.

A fluid prefill worker without work decodes sequences that find no better worker
(`router.policies.slo`). It also takes sequences that run elsewhere (`router.policies.balancing`).
These sequences slow its prompts down. So when the head of the queue waits for a prefill worker,
they may move to decode workers. The stages of such a move are those of any other
(`router.machine.moves.moving`).

A sequence with a TPOT bound moves if its target has room and keeps the bound. A sequence without a
bound moves if the rule by which it was lent now favours the target. The rule counts the tokens
still to come and the transfer. It is also checked when the worker starts a prompt: the sequence may
have been lent in a pause between prompts.

If no decode worker may take a sequence with a bound, it moves to a prefill worker that already
decodes more sequences. Each prefill worker that decodes at all loses about half of its time for
prompts.
"""

from engine.messages import Role, WorkerId
from router.cluster.view import WorkerView
from router.machine.flight import Flight, Move
from router.machine.moves.reasons import COUNTED_AS, GATHERED, GIVEN_BACK
from router.machine.moves.rule import REST_S, MoveRule
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.base import Need
from router.policies.joining import reachable
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


class Lending:
    """Starts the moves of sequences that prefill workers give back."""

    def __init__(self, state: RouterState, placing: Placing, rule: MoveRule) -> None:
        self._state = state
        self._placing = placing
        self._rule = rule
        self._next_look_s = 0.0

    def on_prompt(self, worker: WorkerView, now_s: float) -> bool:
        """Starts moves of sequences without a bound from a worker that has started a prompt.

        Returns True if any move started. The first sequence that should stay ends the search: a
        step takes equally long for all, and comparing all decode workers for each would take too
        long.
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
        """Starts moves if prompts wait, but not too often. Returns True if any move started."""
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
        # Room reserved by moves has other sequence ids.
        flights = [by_seq[seq_id] for seq_id in worker.decodes if seq_id in by_seq]
        return [flight for flight in flights if _may_move(flight, worker_id, now_s)]

    def _move(self, flight: Flight, worker: WorkerView, now_s: float) -> bool:
        attempt = flight.attempt
        assert attempt is not None
        need = self._placing.need(flight, now_s)
        reason, target = self._target(flight, need, worker, now_s)
        if target is None:
            return False
        flight.rests_until_s = now_s + REST_S
        self._state.counters[COUNTED_AS[reason], "begun"] += 1
        move = Move(flight.next_seq_id(), target, need.end_len, reason)
        self._rule.begin(flight, attempt, move, now_s)
        return True

    def _target(
        self, flight: Flight, need: Need, worker: WorkerView, now_s: float
    ) -> tuple[str, WorkerId | None]:
        """Returns the reason and the target of a move; the target is None if it should stay."""
        view, attempt = self._state.view, flight.attempt
        assert attempt is not None
        target = self._rule.choose(attempt, need)
        if target is not None and self._pays(flight, need, (worker, view.workers[target]), now_s):
            return GIVEN_BACK, target
        bound_s = flight.limits.tpot_s
        fuller = None if bound_s is None else self._fuller_lender(need, worker, bound_s)
        return GATHERED, fuller

    def _fuller_lender(self, need: Need, here: WorkerView, bound_s: float) -> WorkerId | None:
        """Returns the lender with the longest steps within the bound; None if it is this one."""
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
        """True if the sequence should move to this worker, or if times are unknown."""
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
    """True if the sequence runs on the lender, is not moving and has not moved just before."""
    attempt = flight.attempt
    if attempt is None or attempt.decode != lender or attempt.move is not None:
        return False
    return attempt.is_lent and attempt.is_decoding and now_s >= flight.rests_until_s
