"""A second attempt for a prompt that takes far too long; the first attempt to finish is kept.

    prefilling ──overdue──> two attempts ──PrefillDone of A──> A decodes, B is cancelled
                                  └──A fails──> only B continues

A worker that is slow, or that hangs undetected, delays the prompts sent to it. An attempt is
overdue when its first token takes `router.hedge_after` times as long as predicted, and at least a
second, counted from the sending of the prompt. Prompt and seed determine the tokens, so both
attempts produce the same answer.

A second attempt reserves room at its workers, and releases it at its end, like any other attempt.
But no prefix is pulled for a second attempt. A request has at most one second attempt, and second
attempts are a bounded share of all placements: if all steps take longer than predicted, more work
would make the delay worse. A prompt without a prediction is not hedged.
"""

from msgspec.structs import replace

from router.machine.ends import Ends
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.base import Decision

HEDGE_SHARE = 0.05  # maximum share of second attempts among all placements
HEDGE_BURST = 8.0  # maximum number of second attempts that can be saved up
AGAIN_S = 1.0  # seconds to the next try, if there was no room or no credit


class Hedging:
    """Starts second attempts, and cancels the attempt that does not finish first."""

    def __init__(self, state: RouterState, ends: Ends, placing: Placing) -> None:
        self._state = state
        self._ends = ends
        self._placing = placing
        self._credit = HEDGE_BURST  # number of second attempts that may be started now
        self._num_placed = 0  # number of placements already added to the credit

    def examine(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Starts a second attempt if the first one is overdue and a worker has room."""
        attempt = flight.attempt
        if attempt is None or attempt.hedge_due_s is None or attempt.hedge_due_s > now_s:
            return []
        effect = self._place_beside(flight, attempt, now_s)
        if effect is None:
            attempt.hedge_due_s = now_s + AGAIN_S
            return []
        self._state.counters["hedge", "begun"] += 1
        return [effect]

    def _place_beside(self, flight: Flight, first: Attempt, now_s: float) -> SendTo | None:
        """Starts a second attempt without the worker that prefills the first one.

        Returns None if no worker has room, or if the budget of second attempts is used up.
        """
        num_new = self._placing.num_placed - self._num_placed
        self._credit = min(self._credit + HEDGE_SHARE * num_new, HEDGE_BURST)
        self._num_placed += num_new
        if self._credit < 1.0:
            return None
        need = replace(self._placing.need(flight, now_s), may_pull=False)
        decision = self._placing.choose(flight, need, now_s, other_than=first.prefill)
        if not isinstance(decision, Decision):
            return None
        self._credit -= 1.0
        first.hedge_due_s = None
        flight.num_hedges += 1
        flight.hedge = self._placing.start_attempt(flight, decision, need, now_s)
        effect = self._placing.send_prefill(flight, flight.hedge, None, now_s)
        self._state.deadlines.watch(flight)
        return effect

    def settle(self, flight: Flight, winner: Attempt, now_s: float) -> list[RouterEffect]:
        """Cancels the losing attempt, because `winner` has produced the first token."""
        first, second = flight.attempt, flight.hedge
        assert first is not None
        assert second is not None
        if winner is second:
            return self._ends.drop(flight, first, "won", now_s)
        return self._ends.drop(flight, second, "lost", now_s)

    def validate(self) -> None:
        """Asserts that the number of second attempts is within their share of all placements."""
        assert 0.0 <= self._credit <= HEDGE_BURST
