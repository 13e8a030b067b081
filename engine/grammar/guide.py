"""The interface of guides. A guide says which tokens a grammar allows next.

The grammar and the tokens of the answer so far determine a guide's state, so any worker can make
the guide again. Queries about proposed tokens do not change the guide.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.errors import GrammarError
from engine.messages import Grammar


class Guide(Protocol):
    """The state of a grammar along one answer. Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Advances the guide by the next token of the answer, which the mask must have allowed."""
        ...

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """Returns the number of leading proposed tokens that the grammar allows in this order."""
        ...

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """Returns masks of the ids that may come next, and after each token of `ahead`.

        All tokens of `ahead` must be allowed. The masks are uint32 [len(ahead) + 1, words]: id i is
        allowed if bit i % 32 of word i // 32 is set. If the answer is complete, only tokens that
        end the answer are allowed.
        """
        ...

    @property
    def fault(self) -> str | None:
        """Returns why the answer cannot go on, or None. The cause: the grammar became too costly to
        follow.

        With a fault no token is allowed, and the sequence must be given back.
        """
        ...


OpenedGuide = Guide | GrammarError  # a guide, or the error of opening it


class Guides(Protocol):
    """Makes guides for one tokenizer."""

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> Guide:
        """Returns a guide that has consumed `answer`. Raises GrammarError.

        Compiled grammars are cached for each salt separately. So timing reveals nothing about the
        grammars of other tenants.
        """
        ...
