"""A second attempt for a prompt that takes far too long; the first attempt to finish is kept.

    prefilling ──overdue──> two attempts ──PrefillDone of one──> that one, the other is cancelled
                                  └──one fails──> the other, as if there had been no more

A worker that is slow, or that hangs undetected, delays the prompts sent to it. An attempt is
overdue when its first token takes `router.hedge_after` times as long as predicted, and at least a
second, counted from the sending of the prompt. Prompt and seed determine the tokens, so it does not
matter which attempt produces them.

A second attempt is like any other: it reserves room at its workers, and they are told of its end.
But no prefix is pulled for it. A request has at most one second attempt, and second attempts are a
bounded share of all placements: if all steps take longer than predicted, more work would make the
delay worse. A prompt without a prediction is not hedged.
"""

from collections import Counter

from router.machine.ends import Ends
from router.machine.events import RouterEffect
from router.machine.flight import Attempt, Flight
from router.machine.placing import Placing

AGAIN_S = 1.0  # delay of the next try after one without room or credit


class Hedging:
    """Starts second attempts, and cancels the attempt that does not finish first."""

    def __init__(self, counters: Counter[tuple[str, str]], ends: Ends, placing: Placing) -> None:
        self._counters = counters
        self._ends = ends
        self._placing = placing

    def examine(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Starts a second attempt if the first is overdue and a worker has room."""
        attempt = flight.attempt
        if attempt is None or attempt.hedge_due_s is None or attempt.hedge_due_s > now_s:
            return []
        effect = self._placing.place_beside(flight, now_s)
        if effect is None:
            attempt.hedge_due_s = now_s + AGAIN_S
            return []
        self._counters["hedge", "begun"] += 1
        return [effect]

    def settle(self, flight: Flight, winner: Attempt, now_s: float) -> list[RouterEffect]:
        """Ends the losing attempt: `winner` has produced the first token."""
        if flight.hedge is None:
            return []
        assert flight.attempt is not None
        hedge_won = winner is flight.hedge
        return self._ends.drop(
            flight,
            flight.attempt if hedge_won else flight.hedge,
            "won" if hedge_won else "lost",
            now_s,
        )
