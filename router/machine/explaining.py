"""Adds the predictions for other workers to a decision, for operators who read the decision.

A few decisions per second are explained; in a quiet deployment, all of them. No decision depends on
an explanation. An explanation lists the workers that could have computed the prompt, with the
predictions for each worker. The policy `slo` compares the same numbers.
"""

import random
from collections.abc import Callable
from math import inf

from msgspec.structs import replace

from engine.messages import WorkerId
from router.machine.state import RouterState
from router.policies.base import (
    Asked,
    Busy,
    Candidates,
    Decision,
    Impossible,
    Known,
    Need,
    PrefillCandidate,
)
from router.policies.candidates import predicted_ready_s
from router.policies.pulling import Holders, bid
from router.policies.slo import bound_s, slowdown_of

PER_S = 4.0
BURST = 8.0

RoomFor = Callable[[Need, float], Candidates | Busy | Impossible]


class Explaining:
    """Adds the compared candidates to decisions."""

    def __init__(self, state: RouterState, room_for: RoomFor) -> None:
        self._state = state
        self._room_for = room_for
        self._credit = BURST
        self._seen_s = 0.0
        self._rng = random.Random(0)  # separate from the generator of decisions

    def explained(self, decision: Decision, need: Need, known: Known, now_s: float) -> Decision:
        """Returns the decision; candidates are added while the budget for explanations lasts."""
        self._credit = min(self._credit + PER_S * max(now_s - self._seen_s, 0.0), BURST)
        self._seen_s = now_s
        if self._credit < 1.0:
            return decision
        self._credit -= 1.0
        room = self._room_for(need, now_s)
        if not isinstance(room, Candidates):
            return decision
        state = self._state
        asked = Asked(state.view, room, need, known, state.estimates, now_s, self._rng)
        return replace(decision, candidates=compared(asked, decision.prefill_worker))


MOST_SHOWN = 8
MOST_COMPARED = 64  # workers; decisions in a larger pool are not explained


def compared(asked: Asked, chosen: WorkerId) -> tuple[PrefillCandidate, ...]:
    """Returns the chosen candidate first, and then the others with the least predicted TTFT."""
    workers = asked.view.workers
    items = dict(asked.candidates.prefillers)
    if chosen in workers:
        items[chosen] = workers[chosen]
    if len(items) > MOST_COMPARED:
        return ()
    holders, pace_s = Holders(asked), bound_s(asked)
    found = []
    for worker_id, worker in items.items():
        held = holders.matched.get(worker_id, 0)
        best = bid(asked, (worker_id, worker), held, holders.best_for((worker_id, worker)))
        wait_s = predicted_ready_s(worker, asked.costs, asked.now_s)
        slowdown = slowdown_of(worker, asked.costs, pace_s)
        ttft_s = None
        if wait_s is not None and best.seconds is not None and slowdown < inf:
            ttft_s = wait_s + best.seconds * slowdown
        found.append(PrefillCandidate(worker_id, wait_s, ttft_s, held))
    found.sort(key=lambda each: (each.predicted_ttft_s is None, each.predicted_ttft_s or 0.0))
    others = [each for each in found if each.worker_id != chosen]
    own = [each for each in found if each.worker_id == chosen]
    return (*own, *others[: MOST_SHOWN - 1])
