"""A guide for answers that begin with reasoning. The grammar applies only after the reasoning.

Reasoning lasts until one token, the end mark. If the prompt does not open the reasoning, the answer
may open it with the begin mark. An answer may also end within its reasoning. If that were
forbidden, a model that wants to stop would generate tokens up to the length limit.
"""

from collections.abc import Sequence

import numpy as np

from engine.grammar.guide import Guide
from engine.messages import ThinkingMarks

WORD_BITS = 32


class ThinkingGuide:
    """The state of one answer, with its reasoning; implements `engine.grammar.guide.Guide`."""

    def __init__(self, inner: Guide, marks: ThinkingMarks, *, vocab_size: int) -> None:
        """`inner` is the guide of the text after the reasoning. It must not have consumed any
        token.
        """
        self._inner = inner
        self._marks = marks
        # None: reasoning has not begun, but still may
        self._is_thinking: bool | None = True if marks.is_inside else None
        bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=bool)
        bits[:vocab_size] = True
        self._anything = np.packbits(bits, bitorder="little").view(np.uint32)

    @property
    def fault(self) -> str | None:
        """Returns the fault of the inner guide."""
        return self._inner.fault

    def consume(self, token_id: int) -> None:
        """Advances the guide by the next token."""
        before = self._is_thinking
        self._is_thinking = self._after(before, token_id)
        if self._is_thinking is False and before is not True:
            self._inner.consume(token_id)

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """Returns the number of leading proposed tokens that are allowed one after the other."""
        num, rest = self._num_thought(ahead)
        return num if rest is None else num + self._inner.num_allowed(rest)

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """Returns masks uint32 [len(ahead) + 1, words], as `engine.grammar.guide.Guide` defines
        them.
        """
        num, rest = self._num_thought(ahead)
        thought = [self._anything] * (num if rest is not None else num + 1)
        if self._is_thinking is None:
            begins = self._inner.masks([] if num > 0 else ahead)
            begins[0, self._marks.begin // WORD_BITS] |= np.uint32(
                1 << self._marks.begin % WORD_BITS
            )
            if num == 0:
                return begins
            thought[0] = begins[0]
        if rest is not None:
            thought += list(self._inner.masks(rest))
        return np.array(thought)

    def _num_thought(self, ahead: Sequence[int]) -> tuple[int, Sequence[int] | None]:
        """Returns the number of tokens that belong to the reasoning. Returns the later tokens as
        well, or None if the reasoning has not ended.
        """
        state = self._is_thinking
        if state is False or (state is None and (not ahead or ahead[0] != self._marks.begin)):
            return 0, ahead
        for place, token_id in enumerate(ahead):
            state = self._after(state, token_id)
            if state is False:
                return place + 1, ahead[place + 1 :]
        return len(ahead), None

    def _after(self, state: bool | None, token_id: int) -> bool | None:  # noqa: FBT001 - a state
        if state is None:
            return token_id == self._marks.begin
        return state and token_id != self._marks.end
