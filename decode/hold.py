"""Holds a step back for sequences that have just moved to this worker.

A moved sequence lacks a block or two, and its client waits in the middle of an answer. So the next
step is held while these blocks are pulled, for `HOLD_S` at most; otherwise the sequence would wait
for a whole step first. No step is held twice, and each sequence is waited for once. After a held
step no step is held for `REST_S`, however many sequences move here one after another.
"""

from collections import Counter
from collections.abc import Set
from math import inf

from engine.messages import SeqId

HOLD_S = 0.02  # longest time for which a step is held
REST_S = 0.05  # time after a held step in which no step is held


class StepHold:
    """Decides whether the next step is held. Counts `held_steps` and `held_steps:late`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._awaited: set[SeqId] = set()  # moved here, and pulling since the last step
        self._until_s: float | None = None  # the next step is held until then
        self._delays_running = False  # the held step delays sequences that run
        self._rests_until_s = -inf

    @property
    def until_s(self) -> float | None:
        """The time until which the next step is held; None if it is not held."""
        return self._until_s

    @property
    def is_open(self) -> bool:
        """True if the next step is held, or may have to be."""
        return bool(self._awaited) or self._until_s is not None

    def await_blocks(self, seq_id: SeqId) -> None:
        """Waits for the blocks of a sequence that moved here."""
        self._awaited.add(seq_id)

    def holds(self, now_s: float, arriving: Set[SeqId], *, is_any_running: bool) -> bool:
        """True if no step may begin now: blocks of moved sequences are still on their way."""
        if not self.is_open:
            return False  # true for most steps
        self._awaited &= arriving
        if self._awaited and now_s >= self._rests_until_s:
            if self._until_s is None:
                self._until_s = now_s + HOLD_S
            if now_s < self._until_s:
                self._delays_running = self._delays_running or is_any_running
                return True
        if self._delays_running:
            self._counters["held_steps"] += 1
            self._counters["held_steps:late"] += bool(self._awaited)
            self._rests_until_s = now_s + REST_S
        self._awaited.clear()
        self._until_s, self._delays_running = None, False
        return False
