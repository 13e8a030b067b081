"""The interface of guides. A guide computes which tokens a grammar allows next.

The grammar and the answer so far determine a guide's state, so any worker can create the guide
again. Calls about proposed tokens do not change the guide.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.errors import GrammarError
from engine.messages import Grammar


class Guide(Protocol):
    """The state of a grammar after the tokens of one answer. Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Advances the guide by the next token of the answer. The mask must have allowed this
        token.
        """
        ...

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """Returns the number of leading proposed tokens that the grammar allows one after the
        other.
        """
        ...

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """Returns masks of the allowed ids: for the next token, and for the token after each of
        `ahead`.

        All tokens of `ahead` must be allowed. The masks are uint32 [len(ahead) + 1, words]: id i is
        allowed if bit i % 32 of word i // 32 is set. If the answer is complete, only tokens that
        end the answer are allowed.
        """
        ...

    @property
    def fault(self) -> str | None:
        """Returns the reason why the answer cannot continue, or None.

        A guide has a fault once its grammar has become too costly to follow. Then no token is
        allowed, and the worker must give the sequence back.
        """
        ...


OpenedGuide = Guide | GrammarError  # a guide, or the error that opening the guide raised


class Guides(Protocol):
    """Makes guides for one tokenizer."""

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> Guide:
        """Returns a guide that has consumed `answer`. Raises GrammarError.

        Compiled grammars are cached for each salt separately. So the time of a call reveals nothing
        about the grammars of other tenants.
        """
        ...
