"""The seam between makers and users of guides. A guide tells what a grammar allows next.

Its grammar and the tokens of the answer so far determine a guide, so any worker can make it again.
Questions about tokens that are only proposed do not change it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.errors import GrammarError
from engine.messages import Grammar


class Guide(Protocol):
    """The place of one answer in its grammar. Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Advances by the next token of the answer, which the mask allowed."""
        ...

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """Returns how many of these proposed tokens, from the first on, may follow one another."""
        ...

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """The ids that may come next, and after each of `ahead`, all of which are allowed.

        uint32 [len(ahead) + 1, words]: id i is allowed if bit i % 32 of word i // 32 is set. If the
        answer is complete, only tokens that end it are allowed.
        """
        ...

    @property
    def fault(self) -> str | None:
        """The reason why the answer cannot go on, or None: following the grammar became too costly.

        Then nothing is allowed, and the sequence must be given back.
        """
        ...


OpenedGuide = Guide | GrammarError  # the result of opening one


class Guides(Protocol):
    """Makes guides for one tokenizer."""

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> Guide:
        """Returns a guide that has consumed `answer`. Raises GrammarError.

        Compiled grammars are kept for each salt separately, so timing tells a tenant nothing about
        others.
        """
        ...
