"""Adds the predictions for other workers to a decision, for people who look at it.

Bounded: a few decisions a second are explained, in a quiet deployment all. No decision depends on
an explanation.
"""

import random
from collections.abc import Callable

from msgspec.structs import replace

from router.machine.state import RouterState
from router.policies.base import Asked, Busy, Candidates, Decision, Impossible, Known, Need
from router.policies.comparing import compared

PER_S = 4.0
BURST = 8.0

RoomFor = Callable[[Need, float], Candidates | Busy | Impossible]


class Explaining:
    """Adds the candidates to decisions."""

    def __init__(self, state: RouterState, room_for: RoomFor) -> None:
        self._state = state
        self._room_for = room_for
        self._credit = BURST
        self._seen_s = 0.0
        self._rng = random.Random(0)  # separate, so that decisions draw the same numbers without it

    def explained(self, decision: Decision, need: Need, known: Known, now_s: float) -> Decision:
        """Returns the decision, with the candidates if there is time for them."""
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
